"""The ledger's tables. One SQLite file in WAL mode is all that the coordinator keeps."""

SCHEMA_VERSION = 2
"""Grows with every change of the tables: a ledger of another format is refused at once, not found out in a run."""

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;

CREATE TABLE runs (
    run_id TEXT PRIMARY KEY,
    sequence INTEGER NOT NULL,                 -- order of submission
    spec_yaml TEXT NOT NULL,
    state TEXT NOT NULL,                       -- queued running paused succeeded failed cancelled
    message TEXT NOT NULL DEFAULT '',
    directory TEXT NOT NULL,
    submitted_s REAL NOT NULL,                 -- wall clock, for people only
    cursor INTEGER NOT NULL DEFAULT 0,         -- prompts drawn from the data set
    next_slot INTEGER NOT NULL DEFAULT 0,      -- groups ever given a place; place // B is the step
    session INTEGER NOT NULL DEFAULT 0,        -- newest learner session
    next_batch INTEGER NOT NULL DEFAULT 0,     -- first step whose batch is not fixed
    next_step INTEGER NOT NULL DEFAULT 0,      -- first step that is not trained
    published_step INTEGER NOT NULL DEFAULT -1,-- highest version that any member acknowledged
    chain TEXT NOT NULL DEFAULT '',            -- hash chain over the trained batches
    dropped_in_a_row INTEGER NOT NULL DEFAULT 0,
    export_path TEXT NOT NULL DEFAULT ''
);

CREATE TABLE groups (
    run_id TEXT NOT NULL,
    group_id INTEGER NOT NULL,
    class TEXT NOT NULL,                       -- train, or eval:<step>, which is outside batches and books
    state TEXT NOT NULL,                       -- admitted leased generated scored batched trained dropped
    slot INTEGER NOT NULL,                     -- place in the order; a replacement inherits it
    prompt_json TEXT NOT NULL,
    columns_json TEXT NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0,        -- of generating; committed before the lease is sent
    member_id TEXT,                            -- who holds the lease
    lease_step INTEGER,                        -- version that the holder had: the oldest that tokens can have
    score_attempt INTEGER NOT NULL DEFAULT 0,
    score_failures INTEGER NOT NULL DEFAULT 0,
    scorer_id TEXT,                            -- who holds the score task
    tokens INTEGER NOT NULL DEFAULT 0,         -- completion tokens committed
    sequence_tokens INTEGER NOT NULL DEFAULT 0,-- prompt and completion tokens: what balancing counts
    oldest_step INTEGER,                       -- oldest version among the tokens
    digest TEXT,
    rewards BLOB,                              -- [C, F] float32, little endian
    functions TEXT,                            -- names of the F functions, JSON
    reward REAL,                               -- mean weighted reward
    step INTEGER,                              -- of its batch
    rank_order INTEGER,                        -- place in its batch
    reason TEXT,                               -- why dropped
    PRIMARY KEY (run_id, group_id)
) WITHOUT ROWID;
CREATE INDEX open_groups ON groups (run_id, class, state, slot, group_id)
    WHERE state NOT IN ('trained', 'dropped');
CREATE INDEX held_groups ON groups (member_id) WHERE state = 'leased';
CREATE INDEX step_groups ON groups (run_id, step, rank_order) WHERE step IS NOT NULL;

CREATE TABLE payloads (                        -- apart from groups, so that scans stay small
    run_id TEXT NOT NULL,
    group_id INTEGER NOT NULL,
    kind TEXT NOT NULL,                        -- result, or prefix: handed back unfinished
    header BLOB NOT NULL,                      -- GroupResult or LeaseReturn: texts and finish reasons
    arrays BLOB NOT NULL,                      -- safetensors frame as it came
    PRIMARY KEY (run_id, group_id, kind)
);

CREATE TABLE counters (                        -- durable counts, so that nothing has to count rows
    run_id TEXT NOT NULL,
    name TEXT NOT NULL,                        -- groups:<state>, tokens:<what>
    value INTEGER NOT NULL,
    PRIMARY KEY (run_id, name)
) WITHOUT ROWID;

CREATE TABLE free_slots (run_id TEXT NOT NULL, slot INTEGER NOT NULL, PRIMARY KEY (run_id, slot)) WITHOUT ROWID;

CREATE TABLE deaths (                          -- workers that crashed while they held a group
    run_id TEXT NOT NULL,
    group_id INTEGER NOT NULL,
    member_id TEXT NOT NULL,
    PRIMARY KEY (run_id, group_id, member_id)
) WITHOUT ROWID;

CREATE TABLE batches (
    run_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    digest TEXT NOT NULL,                      -- over the digests of its groups, in order
    chain TEXT NOT NULL,                       -- over this and all batches before it
    trained INTEGER NOT NULL DEFAULT 0,
    metrics_json TEXT NOT NULL DEFAULT '{}',   -- known when the batch is fixed: reward, ages, waits
    PRIMARY KEY (run_id, step)
) WITHOUT ROWID;

CREATE TABLE receipts (                        -- what each rank says that it trained
    run_id TEXT NOT NULL,
    session INTEGER NOT NULL,
    step INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    world_size INTEGER NOT NULL,
    group_ids TEXT NOT NULL,                   -- JSON list
    digests TEXT NOT NULL,                     -- JSON list
    tokens INTEGER NOT NULL,
    PRIMARY KEY (run_id, session, step, rank)
) WITHOUT ROWID;

CREATE TABLE checkpoints (
    run_id TEXT NOT NULL,
    session INTEGER NOT NULL,
    step INTEGER NOT NULL,
    path TEXT NOT NULL,
    sha256 TEXT NOT NULL,
    chain TEXT NOT NULL,
    removed INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (run_id, session, step)
) WITHOUT ROWID;

CREATE TABLE evaluations (
    run_id TEXT NOT NULL,
    step INTEGER NOT NULL,                     -- version to evaluate, at least
    member_id TEXT,                            -- who is pinned
    pinned_session INTEGER,
    pinned_step INTEGER,
    done INTEGER NOT NULL DEFAULT 0,
    result_json TEXT NOT NULL DEFAULT '{}',
    PRIMARY KEY (run_id, step)
) WITHOUT ROWID;

CREATE TABLE events (
    run_id TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    kind TEXT NOT NULL,
    json TEXT NOT NULL,
    PRIMARY KEY (run_id, sequence)
) WITHOUT ROWID;
"""

"""The ledger's tables: one SQLite file in WAL mode. Texts and arrays are in segments beside it (segments.py)."""

SCHEMA_VERSION = 9
"""Version of the ledger's format; Paceline 0.1.0 has 9. Each change of the tables increments it, so that a ledger of
another format is refused when it is opened, not in the middle of a run."""

UPGRADES: dict[int, str] = {}
"""Upgrade scripts by the format that they start from, beginning with that of 0.1.0. A coordinator runs them when it
opens a ledger, after copying it; `tests/services/coordinator/ledger/test_ledger.py` has the pattern. A script adds
tables, or columns to tables without seals: new seals would hide damage of existing rows."""

SCHEMA = """
-- The column `seal` is a checksum of the row's other columns (ledger/row_checksums.py), NULL if there is none yet.
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL, seal INTEGER) WITHOUT ROWID;

CREATE TABLE runs (
    run_id TEXT PRIMARY KEY,
    sequence INTEGER NOT NULL,                 -- order of submission
    spec_yaml TEXT NOT NULL,
    state TEXT NOT NULL,                       -- queued running paused succeeded failed cancelled
    message TEXT NOT NULL DEFAULT '',
    directory TEXT NOT NULL,
    submitted_s REAL NOT NULL,                 -- wall clock, for people only
    cursor INTEGER NOT NULL DEFAULT 0,         -- prompts drawn from the data set
    next_slot INTEGER NOT NULL DEFAULT 0,      -- slots ever used; slot // B is the step (in_order)
    session INTEGER NOT NULL DEFAULT 0,        -- newest learner session
    next_batch INTEGER NOT NULL DEFAULT 0,     -- first step whose batch is not fixed
    next_step INTEGER NOT NULL DEFAULT 0,      -- first step that is not trained
    published_step INTEGER NOT NULL DEFAULT -1,-- highest version that any member acknowledged
    chain TEXT NOT NULL DEFAULT '',            -- hash chain over the trained batches
    dropped_in_a_row INTEGER NOT NULL DEFAULT 0,
    export_path TEXT NOT NULL DEFAULT '',
    max_num_steps INTEGER NOT NULL DEFAULT 0,  -- as in the spec; with the warnings, so that a list of runs parses no YAML
    warnings_json TEXT NOT NULL DEFAULT '[]',  -- of the spec, JSON list
    vocab_size INTEGER NOT NULL DEFAULT 0,     -- token ids are below this; 0 until the learner reports it
    seal INTEGER
);

CREATE TABLE groups (
    run_id TEXT NOT NULL,
    group_id INTEGER NOT NULL,
    class TEXT NOT NULL,                       -- train, or eval:<step>, which is outside batches and books
    state TEXT NOT NULL,                       -- admitted leased generated scored batched trained dropped
    slot INTEGER NOT NULL,                     -- position in the order of admission; inherited by a replacement
    attempt INTEGER NOT NULL DEFAULT 0,        -- of generating; committed before the lease is sent
    member_id TEXT,                            -- holder of the lease
    lease_step INTEGER,                        -- oldest version that its tokens can have
    score_attempt INTEGER NOT NULL DEFAULT 0,
    score_failures INTEGER NOT NULL DEFAULT 0,
    scorer_id TEXT,                            -- holder of the score task
    tokens INTEGER NOT NULL DEFAULT 0,         -- completion tokens committed
    sequence_tokens INTEGER NOT NULL DEFAULT 0,-- prompt and completion tokens, for balancing
    oldest_step INTEGER,                       -- oldest version among the tokens
    digest TEXT,                               -- Group.digest
    rewards BLOB,                              -- [C, F] float32, little endian
    functions TEXT,                            -- names of the F functions, JSON
    reward REAL,                               -- mean weighted reward
    step INTEGER,                              -- of its batch
    rank_order INTEGER,                        -- index in its batch
    reason TEXT,                               -- drop reason
    generation_failures INTEGER NOT NULL DEFAULT 0, -- caused by its data
    holders TEXT NOT NULL DEFAULT '',          -- holders of the lease, a line for each attempt, in order
    scorers TEXT NOT NULL DEFAULT '',          -- holders of the score task, likewise
    scores_digest TEXT NOT NULL DEFAULT '',    -- over rewards and reference (BatchGroup.scores_digest)
    seal INTEGER,
    PRIMARY KEY (run_id, group_id)
) WITHOUT ROWID;
-- A query that no index serves reads every group that the run ever had (tests/services/coordinator/exchange/test_costs.py). A partial index serves only
-- queries that have its condition word for word, and INDEXED BY keeps SQLite from preferring the primary key.
CREATE INDEX groups_by_state ON groups (run_id, class, state, slot, group_id);
CREATE INDEX held_groups ON groups (member_id) WHERE state = 'leased';
CREATE INDEX held_tasks ON groups (scorer_id) WHERE state = 'generated';
CREATE INDEX free_tasks ON groups (run_id, score_failures, slot, group_id)
    WHERE state = 'generated' AND scorer_id IS NULL;
CREATE INDEX step_groups ON groups (run_id, step, rank_order) WHERE step IS NOT NULL;

CREATE TABLE prompts (                         -- separate, because rows of groups are rewritten with every change
    run_id TEXT NOT NULL,
    group_id INTEGER NOT NULL,
    prompt_json TEXT NOT NULL,
    columns_json TEXT NOT NULL,
    seal INTEGER,
    PRIMARY KEY (run_id, group_id)
);

CREATE TABLE payloads (                        -- separate, so that scans of groups stay small
    run_id TEXT NOT NULL,
    group_id INTEGER NOT NULL,
    kind TEXT NOT NULL,                        -- result; prefix: returned unfinished; reference: its log-probabilities
    header BLOB NOT NULL,                      -- Texts or LeaseReturn: texts and finish reasons
    arrays BLOB NOT NULL,                      -- safetensors frame as it arrived; both are empty if segment is set
    segment INTEGER,                           -- their location instead: number of the file,
    start INTEGER,                             -- offset of the header, which the arrays follow,
    header_size INTEGER,                       -- sizes in bytes
    header_crc INTEGER,                        -- and CRC-32 of each
    arrays_size INTEGER,
    arrays_crc INTEGER,
    PRIMARY KEY (run_id, group_id, kind)
);
CREATE INDEX segment_payloads ON payloads (segment) WHERE segment IS NOT NULL;

CREATE TABLE counters (                        -- durable counts, so that rows need not be counted
    run_id TEXT NOT NULL,
    name TEXT NOT NULL,                        -- groups:<state>, tokens:<generated|wasted|end>, failures:<kind>, …
    value INTEGER NOT NULL,
    seal INTEGER,
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
    revision INTEGER NOT NULL DEFAULT 0,       -- number of batches that it replaces, each with a link of the chain
    with_scores INTEGER NOT NULL DEFAULT 0,    -- 1: the digest covers rewards and reference too
    seal INTEGER,
    PRIMARY KEY (run_id, step)
) WITHOUT ROWID;

CREATE TABLE replaced_batches (                -- batches that were fixed and, untrained, replaced
    run_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    revision INTEGER NOT NULL,                 -- of the replaced batch
    digest TEXT NOT NULL,
    chain TEXT NOT NULL,
    group_ids TEXT NOT NULL,                   -- JSON list, in its order
    dropped_ids TEXT NOT NULL,                 -- JSON list: those that its replacement lacks
    reason TEXT NOT NULL,
    seal INTEGER,
    PRIMARY KEY (run_id, step, revision)
) WITHOUT ROWID;

CREATE TABLE session_faults (                  -- learner sessions that ended by a fault, and at which step
    run_id TEXT NOT NULL,
    session INTEGER NOT NULL,
    step INTEGER NOT NULL,
    kind TEXT NOT NULL,                        -- type of the exception; memory; silent
    message TEXT NOT NULL,
    seal INTEGER,
    PRIMARY KEY (run_id, session)
) WITHOUT ROWID;

CREATE TABLE receipts (                        -- each rank's statement of the groups that it trained
    run_id TEXT NOT NULL,
    session INTEGER NOT NULL,
    step INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    world_size INTEGER NOT NULL,
    group_ids TEXT NOT NULL,                   -- JSON list
    digests TEXT NOT NULL,                     -- JSON list
    tokens INTEGER NOT NULL,
    scores_digests TEXT NOT NULL DEFAULT '[]', -- JSON list, computed by the rank
    seal INTEGER,
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
    damaged TEXT NOT NULL DEFAULT '',          -- why it cannot be loaded; empty if it can
    seal INTEGER,
    PRIMARY KEY (run_id, session, step)
) WITHOUT ROWID;

CREATE TABLE evaluations (
    run_id TEXT NOT NULL,
    step INTEGER NOT NULL,                     -- smallest version to evaluate
    member_id TEXT,                            -- pinned worker
    pinned_session INTEGER,
    pinned_step INTEGER,
    done INTEGER NOT NULL DEFAULT 0,
    result_json TEXT NOT NULL DEFAULT '{}',
    seal INTEGER,
    PRIMARY KEY (run_id, step)
) WITHOUT ROWID;

CREATE TABLE events (
    run_id TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    kind TEXT NOT NULL,
    json TEXT NOT NULL,
    seal INTEGER,
    PRIMARY KEY (run_id, sequence)
) WITHOUT ROWID;

CREATE TABLE episodes (                        -- finished turns of open groups with an environment
    run_id TEXT NOT NULL,
    group_id INTEGER NOT NULL,
    sample INTEGER NOT NULL,                   -- index in the group
    life INTEGER NOT NULL,                     -- of the sample, from 1
    turn INTEGER NOT NULL,                     -- index in its life
    last INTEGER NOT NULL,                     -- whether the sample is finished with it
    left_out TEXT NOT NULL,                    -- JSON list, of the last: turns that are no part of the sample's rows
    row_index INTEGER NOT NULL,                -- row of the sample that it extends
    num_rows INTEGER NOT NULL,                 -- rows of the sample after it
    row_tokens INTEGER NOT NULL,               -- length of its row after it
    tokens INTEGER NOT NULL,                   -- sampled tokens
    oldest_step INTEGER NOT NULL,              -- oldest version among them
    digest TEXT NOT NULL,                      -- over the sampled tokens, their log-probabilities and versions
    context_digest TEXT NOT NULL,              -- over the tokens read before
    header BLOB NOT NULL DEFAULT x'',          -- TurnNote; its location as in payloads
    arrays BLOB NOT NULL DEFAULT x'',
    segment INTEGER,
    start INTEGER,
    header_size INTEGER,
    header_crc INTEGER,
    arrays_size INTEGER,
    arrays_crc INTEGER,
    seal INTEGER,
    PRIMARY KEY (run_id, group_id, sample, life, turn)
);
CREATE INDEX segment_episodes ON episodes (segment) WHERE segment IS NOT NULL;
CREATE TABLE restarts (                        -- lives of samples whose tokens were not trained, whole or in part
    run_id TEXT NOT NULL,
    group_id INTEGER NOT NULL,
    sample INTEGER NOT NULL,
    life INTEGER NOT NULL,
    reason TEXT NOT NULL,                      -- restarted, environment_failed; left_out: by train_call, of a life that was trained
    error TEXT NOT NULL,
    turns INTEGER NOT NULL,                    -- number of its turns, or of those left out
    tokens INTEGER NOT NULL,                   -- sampled tokens of these turns
    given_up INTEGER NOT NULL,                 -- whether no further life begins
    counts INTEGER NOT NULL,                   -- whether it counts against environment.max_failures
    seal INTEGER,
    PRIMARY KEY (run_id, group_id, sample, life)
) WITHOUT ROWID;

CREATE TABLE audit_heads (                     -- newest record of each file of the audit log, outside the chain of batches
    file INTEGER PRIMARY KEY,                  -- number of the file
    sequence INTEGER NOT NULL,                 -- of the record
    hash TEXT NOT NULL,                        -- of the record and all records before it
    seal INTEGER
);

CREATE TABLE models (                          -- versions of registered models; their files are elsewhere
    name TEXT NOT NULL,
    version INTEGER NOT NULL,                  -- from 1
    run_id TEXT NOT NULL,                      -- run that trained it; empty for a model from elsewhere
    session INTEGER NOT NULL,                  -- version of its weights
    step INTEGER NOT NULL,
    chain TEXT NOT NULL,                       -- over the run's batches until then
    path TEXT NOT NULL,                        -- folder or URL of its files
    export_sha256 TEXT NOT NULL,               -- over names and SHA-256 of the exported files
    statement_sha256 TEXT NOT NULL,            -- of its in-toto statement
    spec_sha256 TEXT NOT NULL,
    data TEXT NOT NULL,                        -- fingerprint of the run's data set
    code TEXT NOT NULL,                        -- digest of the run's bundle, or of its reward functions as JSON
    parent TEXT NOT NULL,                      -- name:version; empty without one
    evaluations TEXT NOT NULL,                 -- JSON list of results without samples
    verdicts TEXT NOT NULL,                    -- JSON list of the gate's verdicts
    stage TEXT NOT NULL,                       -- registered passed promoted rolled_back
    registered_by TEXT NOT NULL,
    registered_s REAL NOT NULL,                -- wall clock, for people only
    seal INTEGER,
    PRIMARY KEY (name, version)
) WITHOUT ROWID;
CREATE TABLE model_changes (                   -- promotions and rollbacks of registered models
    name TEXT NOT NULL,
    sequence INTEGER NOT NULL,                 -- from 1
    kind TEXT NOT NULL,                        -- promote rollback
    alias TEXT NOT NULL,
    version INTEGER NOT NULL,                  -- that got the alias
    previous INTEGER NOT NULL,                 -- that had it before; 0 for none
    reason TEXT NOT NULL,                      -- of a promotion past a gate, or of a rollback
    caller TEXT NOT NULL,
    changed_s REAL NOT NULL,
    seal INTEGER,
    PRIMARY KEY (name, sequence)
) WITHOUT ROWID;
"""

"""The ledger: terms, the lock, versions, transactions."""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from ledger_files import both_forms, opened

from paceline.errors import Conflict, LedgerFault, NotFound
from protos.paceline.v1.common_pb2 import ROLE_REWARD, ROLE_ROLLOUT
from protos.paceline.v1.worker_pb2 import CheckpointReport
from services.coordinator.ledger.integrity.file_check import check_file
from services.coordinator.ledger.integrity.report import VerifyReport
from services.coordinator.ledger.ledger import Ledger
from services.coordinator.ledger.schema import SCHEMA, SCHEMA_VERSION
from services.coordinator.ledger.tables.audit_heads import AuditHead

pytestmark = [both_forms, pytest.mark.usefixtures("at_rest")]

FORMAT_2 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;

CREATE TABLE runs (
    run_id TEXT PRIMARY KEY,
    sequence INTEGER NOT NULL,
    spec_yaml TEXT NOT NULL,
    state TEXT NOT NULL,
    message TEXT NOT NULL DEFAULT '',
    directory TEXT NOT NULL,
    submitted_s REAL NOT NULL,
    cursor INTEGER NOT NULL DEFAULT 0,
    next_slot INTEGER NOT NULL DEFAULT 0,
    session INTEGER NOT NULL DEFAULT 0,
    next_batch INTEGER NOT NULL DEFAULT 0,
    next_step INTEGER NOT NULL DEFAULT 0,
    published_step INTEGER NOT NULL DEFAULT -1,
    chain TEXT NOT NULL DEFAULT '',
    dropped_in_a_row INTEGER NOT NULL DEFAULT 0,
    export_path TEXT NOT NULL DEFAULT ''
);

CREATE TABLE groups (
    run_id TEXT NOT NULL,
    group_id INTEGER NOT NULL,
    class TEXT NOT NULL,
    state TEXT NOT NULL,
    slot INTEGER NOT NULL,
    prompt_json TEXT NOT NULL,
    columns_json TEXT NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0,
    member_id TEXT,
    lease_step INTEGER,
    score_attempt INTEGER NOT NULL DEFAULT 0,
    score_failures INTEGER NOT NULL DEFAULT 0,
    scorer_id TEXT,
    tokens INTEGER NOT NULL DEFAULT 0,
    sequence_tokens INTEGER NOT NULL DEFAULT 0,
    oldest_step INTEGER,
    digest TEXT,
    rewards BLOB,
    functions TEXT,
    reward REAL,
    step INTEGER,
    rank_order INTEGER,
    reason TEXT,
    PRIMARY KEY (run_id, group_id)
) WITHOUT ROWID;
CREATE INDEX open_groups ON groups (run_id, class, state, slot, group_id)
    WHERE state NOT IN ('trained', 'dropped');
CREATE INDEX held_groups ON groups (member_id) WHERE state = 'leased';
CREATE INDEX step_groups ON groups (run_id, step, rank_order) WHERE step IS NOT NULL;

CREATE TABLE payloads (
    run_id TEXT NOT NULL,
    group_id INTEGER NOT NULL,
    kind TEXT NOT NULL,
    header BLOB NOT NULL,
    arrays BLOB NOT NULL,
    PRIMARY KEY (run_id, group_id, kind)
);

CREATE TABLE counters (
    run_id TEXT NOT NULL,
    name TEXT NOT NULL,
    value INTEGER NOT NULL,
    PRIMARY KEY (run_id, name)
) WITHOUT ROWID;

CREATE TABLE free_slots (run_id TEXT NOT NULL, slot INTEGER NOT NULL, PRIMARY KEY (run_id, slot)) WITHOUT ROWID;

CREATE TABLE deaths (
    run_id TEXT NOT NULL,
    group_id INTEGER NOT NULL,
    member_id TEXT NOT NULL,
    PRIMARY KEY (run_id, group_id, member_id)
) WITHOUT ROWID;

CREATE TABLE batches (
    run_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    digest TEXT NOT NULL,
    chain TEXT NOT NULL,
    trained INTEGER NOT NULL DEFAULT 0,
    metrics_json TEXT NOT NULL DEFAULT '{}',
    PRIMARY KEY (run_id, step)
) WITHOUT ROWID;

CREATE TABLE receipts (
    run_id TEXT NOT NULL,
    session INTEGER NOT NULL,
    step INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    world_size INTEGER NOT NULL,
    group_ids TEXT NOT NULL,
    digests TEXT NOT NULL,
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
    step INTEGER NOT NULL,
    member_id TEXT,
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
PRAGMA user_version = 2;
"""


def test_every_opening_is_a_new_term(tmp_path: Path) -> None:
    terms = []
    for _ in range(3):
        ledger = Ledger(tmp_path / "deep" / "ledger.sqlite")
        terms.append(ledger.term)
        ledger.close()
    assert terms == [1, 2, 3]


def test_a_reader_beside_the_writer_starts_no_term(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    reader = Ledger(tmp_path / "ledger.sqlite", read_only=True)
    assert reader.term == ledger.term == 1
    with ledger.transaction():
        ledger.add_run("a-1", "{}", "dir")
    assert [row["run_id"] for row in reader.runs()] == ["a-1"]
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.add_run("a-2", "{}", "dir")
    reader.close()
    ledger.close()


def test_a_second_opener_is_refused_until_the_first_closes(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    with pytest.raises(Conflict, match="another coordinator has the ledger"):
        Ledger(path)
    ledger.close()
    second = Ledger(path)
    assert second.term == 2
    second.close()


def test_the_lock_is_the_ledgers_own_whatever_becomes_of_the_file_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    (tmp_path / "ledger.sqlite.lock").unlink()
    with pytest.raises(Conflict, match="another coordinator has the ledger"):
        Ledger(path)
    with ledger.transaction():  # SQLite's own locks are none of the refused one's business
        ledger.db.execute("INSERT INTO meta (key, value) VALUES ('x', 1)")
    ledger.close()


def test_a_coordinator_whose_term_is_over_writes_nothing_more(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    told: list[LedgerFault] = []
    ledger.on_fault = told.append
    other = opened(ledger.path)
    other.execute("UPDATE meta SET value = 9 WHERE key = 'term'")  # as a coordinator elsewhere would
    other.commit()
    with (
        pytest.raises(LedgerFault, match=r"belongs to another coordinator now, in term 9; .* was 1"),
        ledger.transaction(),
    ):
        ledger.db.execute("INSERT INTO meta (key, value) VALUES ('x', 1)")
    assert len(told) == 1
    assert other.execute("SELECT COUNT(*) FROM meta WHERE key = 'x'").fetchone() == (0,)
    other.close()
    ledger.close()


@pytest.mark.parametrize("version", [1, 77])
def test_a_foreign_format_is_refused_and_left_as_it_is(tmp_path: Path, version: int) -> None:
    path = tmp_path / "ledger.sqlite"
    db = opened(path)
    db.execute(f"PRAGMA user_version = {version}")
    db.execute("CREATE TABLE theirs (x)")
    db.commit()
    db.close()
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(Conflict, match=f"has format {version}, this Paceline reads {SCHEMA_VERSION}"):
            Ledger(path, read_only=read_only)
    assert path.read_bytes() == before
    db = opened(path)  # the lock was given back with the refusal
    db.execute("PRAGMA user_version = 0")
    db.execute("DROP TABLE theirs")
    db.commit()
    db.close()
    Ledger(path).close()


def test_an_older_format_is_upgraded_by_a_coordinator_only(tmp_path: Path) -> None:
    """The tables of format 2, as it wrote them, become those of a new ledger; what was in them is there."""
    path = tmp_path / "ledger.sqlite"
    db = opened(path)
    db.executescript(FORMAT_2)
    db.execute("INSERT INTO payloads VALUES ('a-1', 7, 'result', x'01', x'0203')")
    db.execute(
        "INSERT INTO groups (run_id, group_id, class, state, slot, prompt_json, columns_json)"
        " VALUES ('a-1', 7, 'train', 'generated', 0, '\"p\"', '{}')"
    )
    db.commit()
    db.close()
    with pytest.raises(
        Conflict, match=f"has format 2, this Paceline reads {SCHEMA_VERSION}; start its coordinator once"
    ):
        Ledger(path, read_only=True)
    ledger = Ledger(path)
    assert ledger.payload("a-1", 7) == (b"\x01", b"\x02\x03")
    assert tuple(
        ledger.db.execute("SELECT run_id, group_id, prompt_json, columns_json FROM prompts").fetchone()
    ) == ("a-1", 7, '"p"', "{}")
    copy = opened(tmp_path / "ledger.sqlite.format-2")
    assert copy.execute("PRAGMA user_version").fetchone() == (2,)
    assert copy.execute("SELECT prompt_json FROM groups").fetchone() == ('"p"',)
    copy.close()
    new = Ledger(tmp_path / "new" / "ledger.sqlite")
    assert columns(ledger) == columns(new)
    ledger.close()
    new.close()
    Ledger(path, read_only=True).close()


NEW_IN_9 = ("audit_heads", "models", "model_changes")


@pytest.mark.parametrize(("version", "lacks"), [(7, ("episodes", "restarts", *NEW_IN_9)), (8, NEW_IN_9)])
def test_a_reader_takes_the_tables_that_an_older_format_lacks_for_empty(
    tmp_path: Path, version: int, lacks: tuple[str, ...]
) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(Ledger(path)) as ledger, ledger.transaction():
        ledger.add_run("a-1", "name: a", "dir")
        ledger.db.execute("INSERT INTO restarts VALUES ('a-1', 0, 0, 1, 'restarted', '', 2, 9, 0, 1, NULL)")
    with closing(opened(path)) as db:
        for table in lacks:
            db.execute(f"DROP TABLE {table}")
        db.execute(f"PRAGMA user_version = {version}")
    before = path.read_bytes()
    with closing(Ledger(path, read_only=True)) as reader:
        report = VerifyReport()
        check_file(reader.db, report)
        assert report.problems == []
        assert reader.episodes.of_group("a-1", 0) == []
        assert len(reader.episodes.ended("a-1", 0)) == (0 if "restarts" in lacks else 1)
        assert reader.audit_heads.all() == {}
        assert reader.models.after("", 0, 10) == []
    assert path.read_bytes() == before
    with closing(Ledger(path)) as ledger:
        assert ledger.db.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION
        assert [row["run_id"] for row in ledger.runs()] == ["a-1"]
        with ledger.transaction():
            ledger.audit_heads.put(1, AuditHead(3, "aa"))
    assert (tmp_path / f"ledger.sqlite.format-{version}").exists()


def test_the_audit_heads_are_the_newest_of_each_file_in_order(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        assert ledger.audit_heads.newest() == AuditHead(0, "")
        with ledger.transaction():
            for file, sequence in ((1, 4), (2, 6), (2, 9), (10, 11)):
                ledger.audit_heads.put(file, AuditHead(sequence, f"{sequence:x}"))
        assert ledger.audit_heads.all() == {1: (4, "4"), 2: (9, "9"), 10: (11, "b")}
        assert ledger.audit_heads.newest() == AuditHead(11, "b")


def columns(ledger: Ledger) -> dict[str, list[tuple[object, ...]]]:
    """Return SQLite's description of every table's and index's columns."""
    names = [
        row["name"]
        for row in ledger.db.execute("SELECT name FROM sqlite_master WHERE name NOT LIKE 'sqlite%'")
    ]
    return {
        name: [
            tuple(row)
            for kind in ("table", "index")
            for row in ledger.db.execute(f"PRAGMA {kind}_info({name})")
        ]
        for name in sorted(names)
    }


def test_other_tables_are_another_format() -> None:
    """A change of a table takes the next number of the format, here and there: older ledgers lack what was added."""
    words = " ".join(re.sub(r"--.*", "", SCHEMA).split())
    assert (SCHEMA_VERSION, hashlib.sha256(words.encode()).hexdigest()[:16]) == (9, "ad36d169a09676fb")


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"not a ledger, but long enough to be looked at " * 20)
    for read_only in (False, True):
        with pytest.raises(Conflict, match="is no ledger"):
            Ledger(path, read_only=read_only)


def test_reading_needs_a_ledger(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no ledger at"):
        Ledger(tmp_path / "ledger.sqlite", read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_a_transaction_is_all_or_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    with ledger.transaction():
        ledger.add_run("a-1", "{}", "dir")
        ledger.count("a-1", "groups:trained", 3)

    def fail_half_way() -> None:
        with ledger.transaction():
            ledger.count("a-1", "groups:trained", 4)
            ledger.add_event("a-1", "state", {})
            raise KeyError

    with pytest.raises(KeyError):
        fail_half_way()
    assert ledger.counters("a-1") == {"groups:trained": 3}
    assert ledger.events("a-1", 0) == []
    with ledger.transaction():  # the connection is usable again
        ledger.count("a-1", "groups:trained", 1)
    assert ledger.counters("a-1") == {"groups:trained": 4}
    ledger.close()


def test_events_count_up_by_run(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for run_id in ("a-1", "b-2", "a-1", "a-1"):
        ledger.add_event(run_id, "state", {})
    assert [event["sequence"] for event in ledger.events("a-1", 1)] == [2, 3]
    assert [event["sequence"] for event in ledger.events("a-1", 0, limit=1)] == [1]
    assert [event["sequence"] for event in ledger.events("b-2", 0)] == [1]
    assert ledger.events("b-2", 2**64 - 1) == []
    ledger.close()


def test_events_that_workers_cause_are_bounded_and_the_last_one_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.coordinator.ledger.ledger.MAX_EVENTS", {"member": 3})
    path = tmp_path / "ledger.sqlite"
    with closing(Ledger(path)) as ledger, ledger.transaction():
        for number in range(2):
            ledger.add_event("a-1", "member", {"what": number})
    with closing(Ledger(path)) as ledger:
        for _ in range(3):
            with ledger.transaction():
                ledger.add_event("a-1", "member", {"what": "joined"})
                ledger.add_event("a-1", "state", {})
        with ledger.transaction():
            ledger.add_event("b-2", "member", {"what": "joined"})
        found = ledger.events("a-1", 0)
        assert [event["kind"] for event in found] == ["member"] * 3 + ["state"] * 3
        assert json.loads(found[2]["json"]) == {
            "message": "this run has 3 events of the kind 'member'; further ones are in the log alone"
        }
        assert json.loads(ledger.events("b-2", 0)[0]["json"]) == {"what": "joined"}


def test_an_unknown_run_names_the_known_ones(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    with pytest.raises(NotFound, match="none"):
        ledger.run("a-1")
    ledger.add_run("a-1", "{}", "dir")
    ledger.add_run("b-2", "{}", "dir")
    with pytest.raises(NotFound, match="'x'; the newest are: b-2, a-1"):
        ledger.run("x")
    assert [row["sequence"] for row in ledger.runs()] == [1, 2]
    ledger.close()


def test_the_newest_checkpoint_is_of_a_trained_step_with_the_ledgers_chain(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.add_run("a-1", "{}", "dir")
    for step in range(3):
        ledger.db.execute(
            "INSERT INTO batches (run_id, step, digest, chain) VALUES ('a-1', ?, '', ?)",
            (step, f"chain{step}"),
        )
    ledger.update_run("a-1", next_step=2, next_batch=3)

    def report(step: int, chain: str) -> None:
        report = CheckpointReport(run_id="a-1", session=1, step=step, path=f"c{step}{chain}", chain=chain)
        report.sha256 = chain
        ledger.checkpoints.add(report)

    def newest() -> str:
        known = ledger.checkpoints.newest("a-1")
        assert known is not None
        return Path(known.path).name

    assert ledger.checkpoints.newest("a-1") is None
    report(1, "chain0")
    report(2, "foreign")
    assert newest() == "c1chain0"
    report(3, "chain2")  # of step 2, whose receipts have not come: the next session has to train it again
    assert newest() == "c1chain0"
    report(2, "chain1")
    assert newest() == "c2chain1"
    ledger.update_run("a-1", next_step=3)
    assert newest() == "c3chain2"
    ledger.close()


def test_holders_are_whoever_has_leases_tasks_or_an_evaluation(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    insert = (
        "INSERT INTO groups (run_id, group_id, class, state, slot, member_id, scorer_id)"
        " VALUES ('a-1', ?, 'train', ?, 0, ?, ?)"
    )
    ledger.db.execute(insert, (1, "leased", "r1", None))
    ledger.db.execute(insert, (2, "leased", "r1", None))
    ledger.db.execute(insert, (3, "generated", None, "w1"))
    ledger.db.execute(insert, (4, "generated", None, None))
    for step, member, done in ((0, "r0", 1), (5, "r2", 0), (6, None, 0)):
        ledger.db.execute(
            "INSERT INTO evaluations (run_id, step, member_id, done) VALUES ('a-1', ?, ?, ?)",
            (step, member, done),
        )
    assert set(ledger.holders()) == {("r1", ROLE_ROLLOUT), ("r2", ROLE_ROLLOUT), ("w1", ROLE_REWARD)}
    assert ledger.group_queries.num_held() == {"r1": 2, "w1": 1}
    ledger.close()

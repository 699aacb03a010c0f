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
from paceline.services.coordinator.ledger import row_checksums
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.ledger.schema import SCHEMA, SCHEMA_VERSION, UPGRADES
from paceline.services.coordinator.ledger.tables.audit_heads import AuditHead
from paceline.v1.common_pb2 import ROLE_REWARD, ROLE_ROLLOUT
from paceline.v1.worker_pb2 import CheckpointReport

pytestmark = [both_forms, pytest.mark.usefixtures("at_rest")]


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
    with ledger.transaction():  # the refused process does not affect SQLite's own locks
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


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        (SCHEMA_VERSION - 1, "use the Paceline that wrote this ledger"),
        (SCHEMA_VERSION + 1, "a newer Paceline wrote this ledger: use that version, or restore an older backup"),
    ],
)
def test_another_format_is_refused_and_left_as_it_is(tmp_path: Path, version: int, remedy: str) -> None:
    path = tmp_path / "ledger.sqlite"
    db = opened(path)
    db.execute(f"PRAGMA user_version = {version}")
    db.execute("CREATE TABLE theirs (x)")
    db.commit()
    db.close()
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(Conflict, match=f"has format {version}, but this Paceline reads {SCHEMA_VERSION}; {remedy}"):
            Ledger(path, read_only=read_only)
    assert path.read_bytes() == before
    db = opened(path)  # the refusal released the lock
    db.execute("PRAGMA user_version = 0")
    db.execute("DROP TABLE theirs")
    db.commit()
    db.close()
    Ledger(path).close()


def test_the_format_before_is_upgraded_by_a_coordinator_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pattern of an upgrade: a script that adds what the format before lacks. Damage of the rows is not hidden."""
    path, before = tmp_path / "ledger.sqlite", SCHEMA_VERSION - 1
    with closing(Ledger(path)) as ledger:
        new = columns(ledger)
        for name in ("a-1", "a-2"):
            ledger.add_run(name, "name: a", "dir")
            ledger.update_run(name, state="succeeded")
    with closing(opened(path)) as db:
        (script,) = db.execute("SELECT sql FROM sqlite_master WHERE name = 'audit_heads'").fetchone()
        db.execute("DROP TABLE audit_heads")
        db.execute(f"PRAGMA user_version = {before}")
        db.execute("UPDATE runs SET spec_yaml = 'name: b' WHERE run_id = 'a-2'")
        db.commit()
    monkeypatch.setitem(UPGRADES, before, f"{script};")
    with pytest.raises(Conflict, match=f"has format {before}, .*; start its coordinator once, which upgrades"):
        Ledger(path, read_only=True)
    with closing(Ledger(path)) as ledger:
        assert ledger.db.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION
        assert columns(ledger) == new
        with ledger.transaction():
            ledger.audit_heads.put(1, AuditHead(3, "aa"))
        rows = ledger.db.execute("SELECT * FROM runs ORDER BY run_id").fetchall()
        assert [row_checksums.of("runs", row) == row["seal"] for row in rows] == [True, False]
    with closing(opened(tmp_path / f"ledger.sqlite.format-{before}")) as copy:
        assert copy.execute("PRAGMA user_version").fetchone() == (before,)
        assert copy.execute("SELECT COUNT(*) FROM runs").fetchone() == (2,)
    Ledger(path, read_only=True).close()


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
    names = [row["name"] for row in ledger.db.execute("SELECT name FROM sqlite_master WHERE name NOT LIKE 'sqlite%'")]
    return {
        name: [tuple(row) for kind in ("table", "index") for row in ledger.db.execute(f"PRAGMA {kind}_info({name})")]
        for name in sorted(names)
    }


def test_other_tables_are_another_format() -> None:
    """A change of a table increments the format here and there, because older ledgers lack the addition."""
    words = " ".join(re.sub(r"--.*", "", SCHEMA).split())
    assert (SCHEMA_VERSION, hashlib.sha256(words.encode()).hexdigest()[:16]) == (9, "ad36d169a09676fb")


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"not a ledger, but long enough to be looked at " * 20)
    for read_only in (False, True):
        with pytest.raises(Conflict, match="is not a ledger"):
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
    monkeypatch.setattr("paceline.services.coordinator.ledger.ledger.MAX_EVENTS", {"member": 3})
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
            "message": "this run has 3 events of the kind 'member'; further ones are only in the log"
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
    report(3, "chain2")  # of step 2, which has no receipts yet: the next session has to train it again
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

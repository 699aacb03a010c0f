"""The ledger: terms, the lock, versions, transactions."""

from __future__ import annotations

import hashlib
import re
import sqlite3
from pathlib import Path

import pytest

from paceline.errors import Conflict, NotFound
from protos.paceline.v1.common_pb2 import ROLE_REWARD, ROLE_ROLLOUT
from protos.paceline.v1.worker_pb2 import CheckpointReport
from services.coordinator.ledger import Ledger
from services.coordinator.schema import SCHEMA, SCHEMA_VERSION


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


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, 77])
def test_a_foreign_format_is_refused_and_left_as_it_is(tmp_path: Path, version: int) -> None:
    path = tmp_path / "ledger.sqlite"
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {version}")
    db.execute("CREATE TABLE theirs (x)")
    db.commit()
    db.close()
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(Conflict, match=f"has format {version}, this Paceline reads {SCHEMA_VERSION}"):
            Ledger(path, read_only=read_only)
    assert path.read_bytes() == before
    db = sqlite3.connect(path)  # the lock was given back with the refusal
    db.execute("PRAGMA user_version = 0")
    db.execute("DROP TABLE theirs")
    db.commit()
    db.close()
    Ledger(path).close()


def test_other_tables_are_another_format() -> None:
    """Who changes a table gives the format the next number, here and there: older ledgers lack what was added."""
    words = " ".join(re.sub(r"--.*", "", SCHEMA).split())
    assert (SCHEMA_VERSION, hashlib.sha256(words.encode()).hexdigest()[:16]) == (2, "a8e2c87f3e0b51b8")


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
    ledger.close()


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
        path = f"c{step}{chain}"
        ledger.add_checkpoint(CheckpointReport(run_id="a-1", session=1, step=step, path=path, chain=chain))

    assert ledger.newest_checkpoint("a-1") is None
    report(1, "chain0")
    report(2, "foreign")
    assert ledger.newest_checkpoint("a-1")["path"] == "c1chain0"
    report(3, "chain2")  # of step 2, whose receipts have not come: the next session has to train it again
    assert ledger.newest_checkpoint("a-1")["path"] == "c1chain0"
    report(2, "chain1")
    assert ledger.newest_checkpoint("a-1")["path"] == "c2chain1"
    ledger.update_run("a-1", next_step=3)
    assert ledger.newest_checkpoint("a-1")["path"] == "c3chain2"
    ledger.close()


def test_holders_are_whoever_has_leases_tasks_or_an_evaluation(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    insert = (
        "INSERT INTO groups (run_id, group_id, class, state, slot, prompt_json, columns_json, member_id, scorer_id)"
        " VALUES ('a-1', ?, 'train', ?, 0, '', '', ?, ?)"
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
    assert ledger.held() == {"r1": 2, "w1": 1}
    ledger.close()

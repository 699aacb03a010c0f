"""Repair does what can be done about each kind of damage, and says it; verify finds nothing afterwards but what it said."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from exchange_drivers import COMMITTED, Learner, MakeWorld, Reward, Rollout, World, fill
from ledger_files import both_forms, opened

from paceline.errors import Conflict, LedgerFault, NotFound
from services.coordinator.audit.repair import repair
from services.coordinator.audit.verify import verify
from services.coordinator.ledger.ledger import Ledger


@pytest.fixture
def closed(make_world: MakeWorld, tmp_path: Path) -> Iterator[World]:
    """Two trained steps, a batch that is fixed, a group that is scored, one that is generated, and a checkpoint; closed."""
    world = make_world(check=False, grpo={"max_num_steps": 6}, async_grpo={"max_trajectory_age_steps": 2})
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    for step in range(2):
        rollout.hold(step)
        fill(rollout, reward, 4)
        learner.train(step)
        with world.ledger.transaction():
            for _ in range(20):
                world.ledger.add_event(world.run_id, "step", {"step": step, "text": "x" * 200})
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "weights").write_bytes(b"weights")
    file = {"path": "weights", "size_bytes": 7, "sha256": hashlib.sha256(b"weights").hexdigest()}
    manifest = json.dumps({"files": [file]}).encode()
    (folder / "manifest.json").write_bytes(manifest)
    with world.ledger.transaction():
        world.ledger.db.execute(
            "INSERT INTO checkpoints (run_id, session, step, path, sha256, chain) VALUES (?, 1, 2, ?, ?, ?)",
            (world.run_id, str(folder), hashlib.sha256(manifest).hexdigest(), world.row["chain"]),
        )
    rollout.hold(2)
    fill(rollout, reward, 4)
    assert learner.part(2) is not None
    for lease in rollout.lease(1):
        assert rollout.finish(lease) == COMMITTED
    world.ledger.close()
    assert problems(world) == []
    yield world
    world.ledger = Ledger(tmp_path / "other.sqlite")  # for the end of the fixture, which closes it


def problems(world: World) -> list[str]:
    with contextlib.closing(Ledger(world.path, read_only=True)) as ledger:
        return verify(ledger, world.run_id).problems


def repaired(world: World) -> str:
    said: list[str] = []
    repair(world.path, said.append)
    assert "is a copy of the SQLite file as it was" in said[0]
    return "\n".join(said[1:])


def change(world: World, *statements: str) -> None:
    """As the disk would: no checksum follows."""
    with contextlib.closing(opened(world.path)) as db:
        for statement in statements:
            assert db.execute(statement).rowcount > 0, statement


def overwrite(world: World, start: int, data: bytes) -> None:
    with contextlib.closing(opened(world.path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with world.path.open("r+b") as file:
        file.seek(start)
        file.write(data)


def root_of(world: World, name: str) -> int:
    """Return the offset of the table's or index's first page."""
    with contextlib.closing(opened(world.path)) as db:
        page: int = db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,)).fetchone()[0]
        size = int(db.execute("PRAGMA page_size").fetchone()[0])
    return (page - 1) * size


@both_forms
def test_single_bits_are_put_back(closed: World) -> None:
    change(
        closed,
        "UPDATE runs SET spec_yaml = replace(spec_yaml, 'name: test', 'name: tesu')",
        "UPDATE events SET json = replace(json, 'text', 'tuxt') WHERE sequence = 3",
        "UPDATE counters SET value = value + 1 - 2 * (value & 1) WHERE name = 'tokens:generated'",
        "UPDATE prompts SET group_id = 1024 WHERE group_id = 0",
        "UPDATE receipts SET seal = seal + 1 - 2 * (seal & 1) WHERE step = 1",
        "UPDATE groups SET holders = CAST(x'f2' || substr(CAST(holders AS BLOB), 2) AS TEXT) WHERE group_id = 1",
    )
    assert len(problems(closed)) >= 6
    said = repaired(closed)
    for name in (
        "column spec_yaml",
        "column json",
        "column value",
        "column group_id",
        "column seal",
        "column holders",
    ):
        assert f"its {name} was put back" in said
    assert problems(closed) == []


@both_forms
def test_arrays_whose_key_has_changed_are_found_again(closed: World) -> None:
    def keys() -> list[tuple[str, int, str]]:
        with contextlib.closing(opened(closed.path)) as db:
            return db.execute("SELECT run_id, group_id, kind FROM payloads ORDER BY rowid").fetchall()

    before = keys()
    change(
        closed,
        "UPDATE payloads SET run_id = 'test-' || char(17) WHERE group_id = 0",
        "UPDATE payloads SET group_id = group_id + (1 << 20) WHERE group_id = 1",
        "UPDATE payloads SET kind = 'rdsult' WHERE group_id = 2",
    )
    assert keys() != before
    said = repaired(closed)
    assert all(
        f"the arrays of group {group_id} of run test-1 were found again" in said for group_id in range(3)
    )
    assert keys() == before
    assert problems(closed) == []


def test_a_spec_that_is_past_a_single_bit_comes_from_the_runs_folder(closed: World) -> None:
    folder = closed.path.parent  # the drivers' run has the ledger's own
    with contextlib.closing(Ledger(closed.path, read_only=True)) as ledger:
        (folder / "spec.yaml").write_text(ledger.run(closed.run_id)["spec_yaml"])
    change(closed, "UPDATE runs SET spec_yaml = 'name: [' || substr(spec_yaml, 5)")
    assert "its column spec_yaml was put back" in repaired(closed)
    assert problems(closed) == []


@both_forms
def test_a_spec_that_nobody_has_is_left_to_a_backup_or_a_registered_model(closed: World) -> None:
    with contextlib.closing(Ledger(closed.path, read_only=True)) as ledger:
        registered = ledger.run(closed.run_id)["spec_yaml"]
    change(closed, "UPDATE runs SET spec_yaml = 'name: [' || substr(spec_yaml, 5)")
    said = repaired(closed)
    copy = closed.path.with_name("spec.yaml")
    assert f"row run_id 'test-1': its spec is damaged, and {copy} has no copy of it" in said
    assert "copy paceline_spec.yaml of a model that was registered from the run there" in said
    assert "what the runs refer to was not looked at" in said
    copy.write_text(registered)
    assert "its column spec_yaml was put back" in repaired(closed)
    assert problems(closed) == []


@both_forms
def test_a_damaged_row_with_a_readable_spec_is_left_to_a_backup(closed: World) -> None:
    change(closed, "UPDATE runs SET message = 'nothing that was written', directory = 'another'")
    assert "row run_id 'test-1': it cannot be repaired; only a backup has it" in repaired(closed)


@both_forms
def test_a_run_whose_row_is_lost_is_named(closed: World) -> None:
    overwrite(closed, root_of(closed, "runs"), bytes(range(200)))
    assert "run test-1: its row with the spec is lost" in repaired(closed)
    (problem,) = problems(closed)
    assert problem.startswith("run test-1: its row with the spec is lost")


@both_forms
def test_an_event_that_cannot_be_read_makes_room_for_a_warning(closed: World) -> None:
    change(closed, "UPDATE events SET json = 'nothing that it was' WHERE sequence = 3")
    said = repaired(closed)
    assert "sequence 3: it could not be read and was taken out" in said
    assert "1 events are lost" in said
    assert problems(closed) == []
    with contextlib.closing(Ledger(closed.path, read_only=True)) as ledger:
        assert ledger.events(closed.run_id, 2, limit=1)[0]["kind"] == "warning"


@both_forms
def test_counters_are_counted_again(closed: World) -> None:
    change(closed, "UPDATE counters SET value = 7777", "UPDATE runs SET cursor = cursor + 5")
    said = repaired(closed)
    assert "the counter groups:trained is 4 by its groups, was 7777" in said
    assert "prompts were drawn by its groups" in said
    assert problems(closed) == []


def test_indexes_are_made_anew(closed: World) -> None:
    start = root_of(closed, "groups_by_state")
    page = closed.path.read_bytes()[start : start + 4096]
    overwrite(closed, start + page.index(b"trained"), b"trainee")
    assert any("index" in problem for problem in problems(closed))
    assert "its indexes were made anew" in repaired(closed)
    assert problems(closed) == []


@both_forms
def test_a_table_that_cannot_be_read_leaves_the_others(closed: World) -> None:
    overwrite(closed, root_of(closed, "session_faults"), b"\xff" * 4096)
    assert problems(closed) != []
    said = repaired(closed)
    assert "made anew of the rows that could be read" in said
    assert problems(closed) == []


def test_rows_beyond_a_page_that_cannot_be_read_are_found(closed: World) -> None:
    """The events fill several pages; one in the middle is lost."""
    text, content = b"x" * 200, closed.path.read_bytes()
    pages = [
        start for start in range(0, len(content), 4096) if content[start : start + 4096].count(text) >= 10
    ]
    assert len(pages) >= 2
    overwrite(closed, pages[0], b"\xff" * 4096)
    said = repaired(closed)
    assert "others are lost" in said
    assert "a warning is in the place of each" in said
    assert problems(closed) == []


def test_a_header_of_zeros_is_written_anew(closed: World) -> None:
    overwrite(closed, 0, bytes(100))
    assert "its header was written anew" in repaired(closed)
    assert problems(closed) == []


@pytest.mark.parametrize(
    ("was", "now"),
    [(b"CREATE TABLE events", b"CRDATE TABLE events"), (b"tableeventsevents", b"tableeventqevents")],
)
def test_a_list_of_tables_that_cannot_be_read_is_put_right(closed: World, was: bytes, now: bytes) -> None:
    with contextlib.closing(opened(closed.path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = closed.path.read_bytes()
    assert content.count(was) == 1
    overwrite(closed, content.index(was), now)
    assert problems_or_fault(closed) != []
    repaired(closed)
    assert problems(closed) == []


def problems_or_fault(world: World) -> list[str]:
    try:
        return problems(world)
    except Conflict as error:
        return [str(error)]


@both_forms
def test_a_file_without_tables_is_left_to_a_backup(closed: World) -> None:
    closed.path.write_bytes(bytes(closed.path.stat().st_size))
    with pytest.raises(
        LedgerFault, match="shows no tables any more and cannot be repaired; restore a backup"
    ):
        repair(closed.path, lambda line: None)
    assert sorted(path.name for path in closed.path.parent.glob("*rescued*")) == []


def test_what_a_truncated_file_has_lost_is_said(closed: World) -> None:
    with closed.path.open("r+b") as file:
        file.truncate(closed.path.stat().st_size - 4096)
    said = repaired(closed)
    assert "4096 of its" in said
    assert "made anew of the rows that could be read" in said
    problems(closed)  # whatever is left, it is no traceback


@both_forms
def test_groups_that_nobody_trained_are_generated_again(closed: World) -> None:
    (segment,) = closed.path.with_name("ledger.sqlite-segments").glob("*.seg")
    with contextlib.closing(Ledger(closed.path, read_only=True)) as ledger:
        rows = ledger.db.execute(
            "SELECT state, start, header_size FROM payloads JOIN groups USING (run_id, group_id) ORDER BY start"
        ).fetchall()
    with segment.open("r+b") as file:
        for row in rows:
            file.seek(row["start"] + row["header_size"] + 70)
            file.write(b"\xff\xfe\xfd")
    said = repaired(closed)
    open_groups = sum(row["state"] != "trained" for row in rows)
    assert open_groups >= 3
    assert said.count("it is admitted now") == open_groups
    left = problems(closed)
    assert len(left) == 4
    assert all(
        "its arrays cannot be read" in problem for problem in left
    )  # of trained groups: a backup has them


@pytest.mark.parametrize("lose", [shutil.rmtree, lambda folder: (folder / "weights").write_bytes(b"weightt")])
def test_checkpoints_that_are_lost_are_marked(
    closed: World, tmp_path: Path, lose: Callable[[Path], object]
) -> None:
    lose(tmp_path / "checkpoint")
    assert len(problems(closed)) == 1
    assert "no session begins from it any more" in repaired(closed)
    assert problems(closed) == []


@both_forms
def test_a_ledger_without_damage_is_as_it_was(closed: World) -> None:
    assert repaired(closed) == ""
    assert problems(closed) == []


def test_a_coordinator_keeps_repair_away(closed: World, tmp_path: Path) -> None:
    with contextlib.closing(Ledger(closed.path)), pytest.raises(Conflict, match="another coordinator"):
        repair(closed.path, lambda line: None)
    with pytest.raises(NotFound, match="no ledger"):
        repair(tmp_path / "other.sqlite", lambda line: None)

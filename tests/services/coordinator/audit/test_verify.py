"""Verify finds what does not agree: one record is changed at a time, and named."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
import sqlite3
from pathlib import Path

import pytest
from exchange_drivers import Learner, MakeWorld, Reward, Rollout, World, fill, make_spec
from ledger_files import opened

from paceline.errors import Conflict, NotFound
from paceline.files.names import EXPORT_MANIFEST
from paceline.services.coordinator.audit import side_records
from paceline.services.coordinator.audit.evidence import RunRows
from paceline.services.coordinator.audit.verify import COMPARISONS, verify
from paceline.services.coordinator.ledger import row_checksums
from paceline.services.coordinator.ledger.file_check import VerifyReport
from paceline.services.coordinator.ledger.ledger import Ledger


@pytest.fixture
def trained(make_world: MakeWorld, tmp_path: Path) -> World:
    """Three steps by two ranks and two sessions, the batch of the fourth fixed, a checkpoint, a dropped group."""
    world = make_world(check=False, grpo={"max_num_steps": 5})
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world, world_size=2)
    rollout.return_lease(rollout.lease(2)[0], error="bad")
    for step in range(3):
        rollout.hold(step)
        fill(rollout, reward, 4)
        learner.train(step)
        if step == 1:
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
            learner = Learner(world, world_size=2)
            learner.train(1)
    rollout.hold(3)
    fill(rollout, reward, 4)
    assert learner.part(3) is not None
    return world


def inspect(world: World, *, deep: bool = False) -> VerifyReport:
    """Verify, as the command does it: read-only, beside the writer."""
    ledger = Ledger(world.path, read_only=True)
    try:
        return verify(ledger, world.run_id, deep=deep)
    finally:
        ledger.close()


def test_an_honest_ledger_has_no_problems(trained: World) -> None:
    report = inspect(trained)
    assert report.problems == []
    assert report.facts["steps"] == 3
    assert report.facts["batches"] == 4
    assert report.facts["chain"] == trained.row["chain"]
    assert report.facts["groups"]["trained"] == 6
    assert report.facts["dropped"] == {"bad_prompt": 1}
    assert report.facts["receipts"] == 8
    assert report.facts["sessions"] == [1, 2]
    assert report.facts["checkpoints"] == report.facts["manifests_on_disk"] == 1
    tokens = report.facts["tokens"]
    assert tokens["generated"] == tokens["trained"] + tokens["dropped"] + tokens["live"]
    assert tokens["trained"] == 6 * 9


TAMPERED = {
    "a group that is gone": ("DELETE FROM groups WHERE group_id = 3", "[3] of the"),
    "a group that nobody admitted": (
        "UPDATE groups SET group_id = 500 WHERE group_id = (SELECT MAX(group_id) FROM groups)",
        "are missing",
    ),
    "a trained group that is dropped": (
        "UPDATE groups SET state = 'dropped', reason = 'x' WHERE group_id = 2",
        "groups: dropped groups by reason are",
    ),
    "a state that does not exist": (
        "UPDATE groups SET state = 'lost' WHERE group_id = 2",
        "'lost' is unknown",
    ),
    "a step without a batch": (
        "UPDATE groups SET step = 9 WHERE group_id = 2",
        "step 9: the step has groups, but no batch",
    ),
    "another size": ("UPDATE groups SET step = 2 WHERE group_id = 2", "groups, but B is 2"),
    "two in one slot": ("UPDATE groups SET slot = 1 WHERE group_id = 4", "slot 1: 2 groups hold this slot"),
    "tokens that were never generated": (
        "UPDATE groups SET tokens = 10 WHERE group_id = 2",
        "trained groups have",
    ),
    "the token accounting": ("UPDATE counters SET value = value + 1 WHERE name = 'tokens:generated'", "tokens: "),
    "trained in the token accounting": (
        "UPDATE counters SET value = value - 1 WHERE name = 'tokens:trained'",
        "but the token accounting has",
    ),
    "dropped in the token accounting": (
        "UPDATE counters SET value = 5 WHERE name = 'tokens:dropped:bad_prompt'",
        "tokens: dropped tokens by reason are {'bad_prompt': 0}, but the token accounting has {'bad_prompt': 5}",
    ),
    "groups in the token accounting": (
        "UPDATE counters SET value = 7 WHERE name = 'groups:trained'",
        "6 groups are trained, but 7 were",
    ),
    "a prompt that was skipped": ("UPDATE runs SET cursor = cursor + 1", "prompts were drawn"),
    "a batch that is gone": (
        "DELETE FROM batches WHERE step = 1",
        "batches: the batches have the steps [0, 2, 3]",
    ),
    "a batch's order": (
        "UPDATE groups SET rank_order = 1 - rank_order WHERE step = 1",
        "step 1: the step's groups have the digest",
    ),
    "the chain of a step": (
        "UPDATE batches SET chain = 'x' WHERE step = 1",
        "step 1: the batches up to this step have",
    ),
    "the run's chain": ("UPDATE runs SET chain = 'x'", "chain: trained batches have"),
    "a step that is trained no more": (
        "UPDATE batches SET trained = 0 WHERE step = 2",
        "step 2: the batch must have trained = True",
    ),
    "a batch too many": ("UPDATE runs SET next_step = 2", "4 batches are fixed, but only 2 steps are trained"),
    "a rank's receipt": (
        "DELETE FROM receipts WHERE step = 2 AND rank = 1",
        "step 2: no session has receipts of all ranks for this trained step",
    ),
    "a receipt of another group": (
        "UPDATE receipts SET group_ids = '[11]' WHERE session = 1 AND step = 0 AND rank = 0",
        "step 0, session 1: rank 0 trained groups [11]",
    ),
    "a group trained twice": (
        "UPDATE receipts SET group_ids = (SELECT r.group_ids FROM receipts r WHERE r.step = 0 AND r.rank = 0),"
        " digests = (SELECT r.digests FROM receipts r WHERE r.step = 0 AND r.rank = 0) WHERE step = 2 AND rank = 0",
        "was trained in step 0 too",
    ),
    "a group trained by two ranks": (
        "UPDATE receipts SET group_ids = (SELECT r.group_ids FROM receipts r WHERE r.step = 2 AND r.rank = 0),"
        " digests = (SELECT r.digests FROM receipts r WHERE r.step = 2 AND r.rank = 0) WHERE step = 2 AND rank = 1",
        "two ranks trained the same group",
    ),
    "a receipt of another text": (
        "UPDATE receipts SET digests = '[\"x\"]' WHERE session = 2 AND step = 1 AND rank = 0",
        "step 1, session 2: rank 0 trained",
    ),
    "a receipt's tokens": (
        "UPDATE receipts SET tokens = 1 WHERE step = 0 AND rank = 0",
        "rank 0 trained 1 tokens",
    ),
    "a session to come": ("UPDATE receipts SET session = 9 WHERE step = 2", "a session that has not begun"),
    "a digest": (
        "UPDATE groups SET digest = 'x' WHERE group_id = 2",
        "group 2: the arrays of the group have the digest",
    ),
    "an age": ("UPDATE groups SET oldest_step = 7 WHERE group_id = 2", "group 2: the oldest version is 0"),
    "rewards": ("UPDATE groups SET rewards = X'00000000' WHERE group_id = 2", "group 2: the group's row has 1 rewards"),
    "arrays": (
        "UPDATE payloads SET arrays = X'00', segment = NULL WHERE group_id = 2",
        "group 2: its arrays cannot be read",
    ),
    "a location": (
        "UPDATE payloads SET start = start + 1 WHERE group_id = 2",
        "group 2: its arrays cannot be read",
    ),
    "arrays of a batch": (
        "DELETE FROM payloads WHERE group_id = (SELECT MIN(group_id) FROM groups WHERE state = 'batched')",
        "but its arrays are not stored",
    ),
    "a checkpoint's chain": ("UPDATE checkpoints SET chain = 'x'", "the chain is x"),
    "a checkpoint ahead": ("UPDATE checkpoints SET step = 8", "the checkpoint is ahead of the ledger"),
    "a checkpoint's manifest": ("UPDATE checkpoints SET sha256 = 'x'", "the manifest has the SHA-256"),
}


@pytest.mark.parametrize(("change", "problem"), TAMPERED.values(), ids=TAMPERED.keys())
def test_what_does_not_agree_is_named(trained: World, change: str, problem: str) -> None:
    assert trained.ledger.db.execute(change).rowcount > 0
    problems = inspect(trained).problems
    assert [line for line in problems if problem in line], problems
    assert all("\n" not in line for line in problems)


def test_files_of_a_checkpoint_that_changed_or_are_gone_are_named(trained: World, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    (folder / "weights").write_bytes(b"weightt")
    (problem,) = inspect(trained).problems
    assert "the file weights has the SHA-256" in problem
    (folder / "weights").write_bytes(b"weight")
    assert "the file weights has 6 bytes, but the manifest says 7" in inspect(trained).problems[0]
    (folder / "weights").unlink()
    assert "the file weights is missing" in inspect(trained).problems[0]
    (folder / "manifest.json").unlink()
    assert "the checkpoint has no manifest.json" in inspect(trained).problems[0]
    folder.rmdir()
    assert "the folder is missing" in inspect(trained).problems[0]
    trained.ledger.db.execute("UPDATE checkpoints SET damaged = 'no such folder'")
    report = inspect(trained)  # no session begins from it: it is as good as pruned
    assert report.problems == []
    assert report.facts["checkpoints_marked_damaged"] == {str(folder): "no such folder"}


def test_only_the_newest_checkpoint_is_read_unless_asked(trained: World, tmp_path: Path) -> None:
    older = tmp_path / "older"
    older.mkdir()
    file = {"path": "weights", "size_bytes": 7, "sha256": hashlib.sha256(b"weights").hexdigest()}
    manifest = json.dumps({"files": [file]}).encode()
    (older / "manifest.json").write_bytes(manifest)
    (older / "weights").write_bytes(b"wrongly")
    trained.ledger.db.execute(
        "INSERT INTO checkpoints (run_id, session, step, path, sha256, chain) SELECT run_id, 1, 1, ?, ?,"
        " (SELECT chain FROM batches WHERE step = 0) FROM runs",
        (str(older), hashlib.sha256(manifest).hexdigest()),
    )
    assert inspect(trained).problems == []
    assert "the file weights has the SHA-256" in inspect(trained, deep=True).problems[0]


def test_what_is_pruned_while_verify_reads_is_no_problem(
    trained: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner deletes a checkpoint that the ledger has forgotten after the snapshot was taken."""
    compare = side_records.checkpoints

    def prune_first(record: RunRows, report: VerifyReport) -> None:
        if (tmp_path / "checkpoint").exists():
            trained.ledger.db.execute("UPDATE checkpoints SET removed = 1")
            shutil.rmtree(tmp_path / "checkpoint")
        compare(record, report)
        seen.append(len(report.found))

    seen: list[int] = []
    monkeypatch.setitem(COMPARISONS, "checkpoints", prune_first)
    assert inspect(trained).problems == []
    assert seen == [1, 0]


def test_an_export_is_held_against_its_manifest(trained: World, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "model").write_bytes(b"model")
    trained.ledger.update_run(trained.run_id, export_path=str(folder))
    assert inspect(trained).facts["export"] == f"{folder} has no manifest"
    file = {"path": "model", "size_bytes": 5, "sha256": hashlib.sha256(b"model").hexdigest()}
    (folder / EXPORT_MANIFEST).write_text(json.dumps({"files": [file]}))
    assert inspect(trained).facts["export"] == f"{folder}: 1 file"
    run = {"run_id": trained.run_id, "session": 1, "step": 1, "spec_sha256": "5bec"}
    chain = trained.ledger.batches.get(trained.run_id, 0)["chain"]  # type: ignore[index]
    for stated, problems in (
        (chain, []),
        ("other", [f"export {folder}: the chain is other, but the ledger has {chain}"]),
    ):
        (folder / EXPORT_MANIFEST).write_text(json.dumps({"run": run | {"chain": stated}, "files": [file]}))
        assert inspect(trained).problems == problems
    (folder / "model").write_bytes(b"modem")
    assert "the file model has the SHA-256" in inspect(trained).problems[0]


UNREADABLE = {
    "a prompt": ("UPDATE prompts SET prompt_json = '{' WHERE group_id = 2", "column prompt_json"),
    "columns of a prompt": (
        "UPDATE prompts SET columns_json = x'00ff' WHERE group_id = 2",
        "column columns_json",
    ),
    "a prompt that is gone": ("DELETE FROM prompts WHERE group_id = 2", "[2] have no prompt"),
    "an event": ("UPDATE events SET json = '{' WHERE sequence = 1", "table events, column json"),
    "an event that is gone": ("DELETE FROM events WHERE sequence = 1", "event 2: the event follows event 0"),
    "rewards": (
        "UPDATE groups SET rewards = x'0000803f000080bf' WHERE group_id = 2",
        "group 2: rewards and reference of the group have the digest",
    ),
    "rewards of a receipt": (
        "UPDATE receipts SET scores_digests = replace(scores_digests, '[\"', '[\"0') WHERE step = 0",
        "with rewards that differ from the ledger's",
    ),
    "groups of a receipt": (
        "UPDATE receipts SET group_ids = '[1,' WHERE step = 0",
        "a receipt cannot be read",
    ),
    "an evaluation": (
        "INSERT INTO evaluations (run_id, step, done, result_json) VALUES ('test-1', 1, 1, '}')",
        "column result_json",
    ),
    "functions": (
        "UPDATE groups SET functions = NULL WHERE group_id = 2",
        "group 2: its arrays cannot be read",
    ),
    "the spec": ("UPDATE runs SET spec_yaml = '[' || spec_yaml", "column spec_yaml"),
    "a number that is text": (
        "UPDATE groups SET tokens = 'x' WHERE group_id = 2",
        "tokens: a record cannot be read",
    ),
    "a free slot": ("INSERT INTO free_slots VALUES ('test-1', 1)", "slots: slots [1] are neither"),
    "a slot that no group has": ("DELETE FROM free_slots", "are neither"),
    "a death": ("INSERT INTO deaths VALUES ('test-1', 2, 'w')", "workers died with this group"),
    "the kind of arrays": ("UPDATE payloads SET kind = 'resulu' WHERE group_id = 2", "'resulu'"),
}


@pytest.mark.parametrize(("change", "problem"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_what_cannot_be_read_is_a_sentence(trained: World, change: str, problem: str) -> None:
    """Rows that the writer itself has written, so that their checksums are right."""
    with trained.ledger.transaction():
        trained.ledger.add_event(trained.run_id, "state", {"state": "running"})
        trained.ledger.add_event(trained.run_id, "warning", {"message": "x"})
        if problem == "are neither":
            trained.ledger.update_run(trained.run_id, next_slot=trained.row["next_slot"] + 1)
            trained.ledger.db.execute("INSERT INTO free_slots SELECT run_id, next_slot - 1 FROM runs")
    assert inspect(trained).problems == []
    assert trained.ledger.db.execute(change).rowcount > 0
    problems = inspect(trained).problems
    assert [line for line in problems if problem in line], problems
    assert all("\n" not in line for line in problems)


def test_a_row_that_the_disk_has_changed_is_named(trained: World) -> None:
    """By another program, which knows nothing of checksums."""
    with contextlib.closing(opened(trained.path)) as db:
        db.execute("UPDATE groups SET holders = CAST(x'fe6f6c6c6f7574' AS TEXT) WHERE group_id = 2")
        db.execute("UPDATE counters SET value = value + 1 - 2 * (value & 1) WHERE name = 'tokens:generated'")
        db.execute("UPDATE receipts SET seal = seal + 1 - 2 * (seal & 1) WHERE step = 0 AND rank = 1")
        db.execute("UPDATE prompts SET columns_json = 'null' WHERE group_id = 1")
        db.commit()
    problems = "\n".join(inspect(trained).problems)
    for row in (
        "table counters, row run_id 'test-1', name 'tokens:generated'",
        "step 0, rank 1",
        "table prompts, row run_id 'test-1', group_id 1",
        "table groups, row run_id 'test-1', group_id 2",
    ):
        assert f"{row}: the row does not match its checksum" in problems


def test_a_file_whose_tables_are_damaged_is_described(trained: World, tmp_path: Path) -> None:
    trained.ledger.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    page_size = trained.ledger.db.execute("PRAGMA page_size").fetchone()[0]
    root = trained.ledger.db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'events'").fetchone()[0]
    content = bytearray(trained.path.read_bytes())
    content[(root - 1) * page_size : (root - 1) * page_size + 64] = b"\xff" * 64
    damaged = tmp_path / "damaged.sqlite"
    damaged.write_bytes(content)
    with contextlib.closing(Ledger(damaged, read_only=True)) as ledger:
        report = verify(ledger, trained.run_id)
    assert any("database disk image is malformed" in problem for problem in report.problems)
    assert any("restore a backup" in problem for problem in report.problems)
    assert report.facts["batches"] == 4  # what can be compared still is


def test_arrays_that_were_pruned_are_no_problem(trained: World) -> None:
    trained.ledger.db.execute("DELETE FROM payloads WHERE group_id IN (SELECT group_id FROM groups WHERE step = 0)")
    assert inspect(trained).problems == []


def test_a_run_that_ended_with_a_batch_fixed_drops_its_groups(trained: World) -> None:
    run = trained.exchange.active
    assert run is not None
    with trained.ledger.transaction():
        trained.exchange.end_run(run.run_id)
    report = inspect(trained)
    assert report.problems == []
    assert report.facts["open"] == 0
    assert report.facts["dropped"]["run_ended"] >= 2
    trained.ledger.db.execute("UPDATE groups SET step = 1 WHERE reason = 'run_ended' AND step = 3")
    assert any("the group is dropped, but its step is 1" in problem for problem in inspect(trained).problems)


def test_a_supervised_run_has_receipts_only(make_world: MakeWorld) -> None:
    world = make_world(algorithm="sft", sft={"max_num_steps": 2}, check=False)
    learner = Learner(world, world_size=2)
    for step in range(2):
        for rank in range(2):
            learner.receipt(step, rank, [], tokens=5)
    assert inspect(world).problems == []
    world.ledger.db.execute("DELETE FROM receipts WHERE step = 1 AND rank = 0")
    assert inspect(world).problems == ["step 1: no session has receipts of all ranks for this trained step"]


def test_an_unknown_run(trained: World) -> None:
    ledger = Ledger(trained.path, read_only=True)
    with pytest.raises(NotFound, match="no run 'other'"):
        verify(ledger, "other")
    assert not ledger.db.in_transaction
    ledger.close()


Content = dict[str, list[tuple[object, ...]]]


def content(path: Path) -> Content | None:
    """Every row of every table; None when SQLite cannot read it, or says that it is damaged."""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        db.text_factory = lambda raw: ("text", raw)
        try:
            if db.execute("PRAGMA integrity_check").fetchall() != [(("text", b"ok"),)]:
                return None
            return {
                name: sorted(db.execute(f"SELECT * FROM {name} NOT INDEXED").fetchall(), key=repr)
                for name in row_checksums.tables()
            }
        except (sqlite3.Error, ValueError, TypeError):
            return None


def problems_or_refusal(path: Path, run_id: str) -> list[str]:
    try:
        with contextlib.closing(Ledger(path, read_only=True)) as ledger:
            return verify(ledger, run_id).problems
    except Conflict as damaged:
        return [str(damaged)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A run that has ended, because the rows of open groups have no checksum; its ledger is closed."""
    directory = tmp_path_factory.mktemp("whole")
    world = World(directory, make_spec(directory, grpo={"max_num_steps": 5, "val_period": 2}))
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world, world_size=2)
    rollout.return_lease(rollout.lease(2)[0], error="bad prompt")
    for step in range(4):
        rollout.hold(step)
        fill(rollout, reward, 8)
        assert learner.train(step) is not None
        if step == 1:
            world.begin_evaluation(2)
            rollout.hold(2)
            fill(rollout, reward, 3)
        with world.ledger.transaction():
            world.ledger.add_event(world.run_id, "step", {"step": step, "loss": 0.25})
    world.end()
    with world.ledger.transaction():
        world.ledger.update_run(world.run_id, state="succeeded")
    world.close()
    return world


@pytest.mark.parametrize("table", row_checksums.tables())
def test_a_flipped_bit_of_a_table_is_found(whole: World, tmp_path: Path, table: str) -> None:
    """A bit of the table's first page after which it reads otherwise."""
    rng, path, before = random.Random(table), tmp_path / "ledger.sqlite", content(whole.path)
    shutil.copytree(f"{whole.path}-segments", f"{path}-segments")
    assert before is not None
    with contextlib.closing(sqlite3.connect(whole.path)) as db:
        (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
    start, data = (page - 1) * size, whole.path.read_bytes()
    used = [place for place in range(start, start + size) if data[place]]
    path.write_bytes(data)
    while content(path) == before:
        changed = bytearray(data)
        changed[rng.choice(used)] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
    assert problems_or_refusal(path, whole.run_id)

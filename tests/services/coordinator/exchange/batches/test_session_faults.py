"""Learner sessions that end at one step: several in a row pause the run; ends at other steps do not."""

from __future__ import annotations

import pytest
from exchange_drivers import INVALID, Learner, MakeWorld, Reward, Rollout, World, fill

from paceline.services.coordinator.exchange.batches import session_faults
from paceline.v1 import worker_pb2

STEP, MEMORY = worker_pb2.FAULT_STEP, worker_pb2.FAULT_MEMORY


def report(
    world: World,
    learner: Learner,
    step: int,
    error: str = "IndexError: index 100000 is out of bounds",
    *,
    rank: int = 0,
    fault: worker_pb2.Fault.ValueType = STEP,
) -> None:
    said = worker_pb2.RunReport(run_id=world.run_id, session=learner.session, error=error, fault=fault, step=step)
    with world.ledger.transaction():
        session_faults.on_report(world.exchange, world.run, said, rank)
    world.notices += world.exchange.notices.take()


def resume(world: World) -> None:
    with world.ledger.transaction():
        world.ledger.update_run(world.run_id, state="running", message="")
        session_faults.reset(world.exchange, world.run_id)


@pytest.fixture
def ready(world: World) -> World:
    """A world with groups for two batches."""
    fill(Rollout(world), Reward(world), 4)
    return world


def test_three_sessions_that_report_the_same_at_a_step_pause_the_run(ready: World) -> None:
    for number in range(3):
        assert ready.row["state"] == "running"
        learner = Learner(ready, world_size=2)
        assert [group.group_id for group in learner.part(0, 1) or []] == [1]
        report(ready, learner, 0, rank=1)
        report(
            ready, learner, 0, "RuntimeError: connection closed by peer", rank=0
        )  # as a consequence of the other rank's fault
        assert len(ready.kinds("warning")) == number + 1
    assert ready.row["state"] == "paused"
    assert ready.row["message"] == (
        "3 sessions of the learner in a row ended at step 0; the last error: IndexError: index 100000 is out of bounds. "
        "The cause may be in groups 1: `paceline drop RUN GROUP...` drops groups from the batch. `paceline resume` tries the "
        "step again"
    )
    assert len(ready.kinds("paused")) == 1
    fourth = Learner(ready)
    assert fourth.part(0) is None  # another session would only end there too
    ready.restart()
    assert fourth.part(0) is None
    resume(ready)
    assert fourth.train(0) == [[0, 1]]


def test_lack_of_memory_names_the_longest_groups_first(make_world: MakeWorld) -> None:
    world = make_world()
    rollout, reward = Rollout(world), Reward(world)
    for lease, length in zip(rollout.lease(4), (3, 12), strict=True):
        rollout.finish(lease, length)
    for task in reward.tasks():
        reward.score(task)
    for _ in range(3):
        learner = Learner(world)
        assert learner.part(0) is not None
        report(world, learner, 0, "OutOfMemoryError: tried to allocate 2 GiB", fault=MEMORY)
    assert "The cause may be in groups 1 0 (the longest first)" in world.row["message"]
    assert "Lower policy.train_mb_tokens" in world.row["message"]


def test_lack_of_memory_is_told_whichever_rank_is_heard_of_first(ready: World) -> None:
    learner = Learner(ready, world_size=2)
    learner.part(0, 0)
    report(ready, learner, 0, "RuntimeError: connection closed by peer", rank=0)
    report(ready, learner, 0, "OutOfMemoryError: no", rank=1, fault=MEMORY)
    (row,) = ready.ledger.db.execute("SELECT kind FROM session_faults").fetchall()
    assert row["kind"] == "memory"


def test_three_sessions_that_end_without_a_word_pause_the_run(ready: World) -> None:
    for _ in range(3):
        assert Learner(ready).part(0) is not None
    assert ready.row["state"] == "running"
    fourth = Learner(ready)
    assert fourth.part(0) is None
    assert ready.row["state"] == "paused"
    assert "the learner's process ended without a report" in ready.row["message"]
    resume(ready)
    assert fourth.part(0) is not None


def test_sessions_that_die_together_with_the_coordinator_pause_the_run(ready: World) -> None:
    for _ in range(3):
        assert Learner(ready, world_size=2).part(0, 1) is not None
        ready.restart()
    fourth = Learner(ready)
    assert fourth.part(0) is None
    assert "the learner's process ended without a report" in ready.row["message"]
    resume(ready)
    assert fourth.part(0) is not None
    ready.restart()
    assert fourth.train(0) == [[0, 1]]  # the record outlived the coordinator
    rows = ready.ledger.db.execute("SELECT session FROM session_faults").fetchall()
    assert rows == []


def test_a_session_that_left_before_a_restart_is_no_fault(ready: World) -> None:
    for _ in range(6):
        learner = Learner(ready)
        learner.part(0)
        with ready.ledger.transaction():
            session_faults.note_left(ready.exchange, ready.run, learner.session)
        ready.restart()
    assert Learner(ready).train(0) == [[0, 1]]


def test_kills_with_progress_in_between_never_pause(ready: World) -> None:
    for _ in range(2):
        assert Learner(ready).part(0) is not None
    assert Learner(ready).train(0) == [[0, 1]]
    for _ in range(2):
        assert Learner(ready).part(1) is not None
    assert Learner(ready).train(0) == [[0, 1]]  # trained again from an older checkpoint
    assert ready.row["state"] == "running"
    assert Learner(ready).train(1) is None or ready.row["state"] == "running"


def test_kills_at_different_steps_never_pause(ready: World) -> None:
    Learner(ready).train(0)
    for step in (0, 1, 0, 1, 0, 1, 0, 1):  # some sessions that train again are killed
        assert Learner(ready).part(step) is not None
    assert ready.row["state"] == "running"


def test_sessions_that_end_before_they_train_count_for_nothing(ready: World) -> None:
    for _ in range(6):
        Learner(ready)
    for _ in range(6):
        learner = Learner(ready)
        learner.part(0)
        with ready.ledger.transaction():
            session_faults.note_left(ready.exchange, ready.run, learner.session)  # left normally
    assert ready.row["state"] == "running"
    assert Learner(ready).train(0) == [[0, 1]]


def test_different_faults_at_one_step_pause_later(ready: World) -> None:
    for number in range(5):
        assert ready.row["state"] == "running"
        learner = Learner(ready)
        assert learner.part(0) is not None
        report(ready, learner, 0, f"Error{number}: other each time")
    assert "5 sessions of the learner in a row" in ready.row["message"]


def test_three_refused_receipts_pause_the_run(ready: World) -> None:
    for _ in range(3):
        learner = Learner(ready)
        part = learner.part(0)
        assert part is not None
        assert learner.receipt(0, 0, part[::-1]).reply.status == INVALID
    assert ready.row["state"] == "paused"
    assert "the receipt of step 0 does not agree with the batch: rank 0 trained groups [1, 0]" in ready.row["message"]


def test_a_step_that_was_trained_before_pauses_too(ready: World) -> None:
    Learner(ready).train(0)
    for _ in range(3):
        learner = Learner(ready)
        assert learner.part(0) is not None
        report(ready, learner, 0)
    assert ready.row["state"] == "paused"


def test_a_person_s_pause_is_not_forgotten(ready: World) -> None:
    learner = Learner(ready)
    learner.part(0)
    ready.set_state("paused")
    assert learner.part(0) is not None  # current work ends
    assert learner.train(0) == [[0, 1]]


def test_runs_without_groups_are_paused_too(make_world: MakeWorld) -> None:
    world = make_world(algorithm="sft", sft={"max_num_steps": 2})
    for _ in range(3):
        learner = Learner(world)
        assert learner.part(0) == []
        report(world, learner, 0)
    assert "in a row ended at step 0" in world.row["message"]
    assert "The cause may be" not in world.row["message"]

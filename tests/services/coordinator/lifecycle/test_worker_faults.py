"""Faults of workers pause the run with the reason, and it goes on automatically; only its spec can fail it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from control_plane import Plane, Worker, learner
from episode_drivers import ENVIRONMENT
from paused_runs import impatient, next_state, put_on, reward, state_of

from paceline.services.coordinator.lifecycle.worker_faults import Decision, decide, explain
from paceline.services.coordinator.members.registry import Fault, Introduction, Member
from paceline.v1 import common_pb2, run_pb2
from paceline.v1.worker_pb2 import (
    FAULT_CHECKPOINT,
    FAULT_PASSING,
    FAULT_SPEC,
    FAULT_UNSPECIFIED,
    RunReport,
)

# The decision


def members(*faults: Fault | None) -> list[Member]:
    return [
        Member(f"reward-{i}", Introduction(common_pb2.ROLE_REWARD), 0.0, fault=fault) for i, fault in enumerate(faults)
    ]


def fault(kind: Any = FAULT_PASSING, run_id: str = "a-1", text: str = "away", *, resumable: bool = False) -> Fault:
    return Fault(run_id, text, kind, resumable)


@pytest.mark.parametrize(
    ("faults", "next_step", "decision"),
    [
        ([], 0, Decision.GO_ON),
        ([None], 0, Decision.GO_ON),
        ([fault(), None], 3, Decision.GO_ON),
        ([fault(run_id="b-2")], 3, Decision.GO_ON),
        ([fault()], 0, Decision.RETRY),
        ([fault(FAULT_UNSPECIFIED)], 0, Decision.RETRY),
        ([fault(FAULT_CHECKPOINT)], 3, Decision.RETRY),
        ([fault(FAULT_SPEC)], 0, Decision.FAIL),
        ([fault(FAULT_SPEC)], 1, Decision.RETRY),
        ([fault(FAULT_SPEC), fault()], 0, Decision.RETRY),
        ([fault(resumable=True)], 0, Decision.ASK),
        ([fault(FAULT_SPEC, resumable=True)], 3, Decision.ASK),
    ],
)
def test_what_faults_mean(faults: list[Fault | None], next_step: int, decision: Decision) -> None:
    assert decide(members(*faults), "a-1", next_step) is decision


def test_the_reason_names_what_each_says() -> None:
    assert explain(members(fault(), fault())) == "reward: away"
    assert explain(members(fault(), fault(text="no file"))) == "reward: reward-0: away; reward-1: no file"
    many = members(*(fault(text=str(i)) for i in range(9)))
    assert explain(many).endswith("reward-4: 4; and 4 more faults")


# Workers


async def test_the_only_worker_of_a_role_that_cannot_set_up_pauses_the_run_until_it_can(
    running: tuple[Plane, str],
) -> None:
    plane, run_id = running
    worker = reward(plane)
    await put_on(worker)
    worker.say(run_report=RunReport(run_id=run_id, error="there is no file 'f.py'", fault=FAULT_PASSING))
    paused = await next_state(plane, run_id, 0, "paused")
    state, message = await state_of(plane, run_id)
    assert (state, message) == ("paused", "reward: there is no file 'f.py'. It is retried automatically")
    worker.say(run_report=RunReport(run_id=run_id))
    await next_state(plane, run_id, paused, "running")
    assert (await state_of(plane, run_id)) == ("running", "")


async def test_an_environment_worker_that_cannot_set_up_pauses_the_run(tmp_path: Path) -> None:
    plane = impatient(Plane(tmp_path))
    await plane.start()
    run_id = (await plane.run_one(**ENVIRONMENT)).run_id
    worker = Worker(plane, common_pb2.ROLE_ENVIRONMENT, "environment-1")
    await put_on(worker)
    worker.say(run_report=RunReport(run_id=run_id, error="no class", fault=FAULT_PASSING))
    paused = await next_state(plane, run_id, 0, "paused")
    assert (await state_of(plane, run_id))[1] == "environment: no class. It is retried automatically"
    worker.say(run_report=RunReport(run_id=run_id))
    await next_state(plane, run_id, paused, "running")
    await plane.stop()


async def test_a_good_worker_that_comes_later_takes_the_run_up(running: tuple[Plane, str]) -> None:
    plane, run_id = running
    bad = reward(plane, "reward-1")
    await put_on(bad)
    bad.say(run_report=RunReport(run_id=run_id, error="no file", fault=FAULT_PASSING))
    paused = await next_state(plane, run_id, 0, "paused")
    good = reward(plane, "reward-2")
    await put_on(good)
    good.say(run_report=RunReport(run_id=run_id))
    await next_state(plane, run_id, paused, "running")


async def test_a_bad_worker_beside_a_healthy_one_is_only_warned_of(running: tuple[Plane, str]) -> None:
    plane, run_id = running
    good, bad = reward(plane, "reward-1"), reward(plane, "reward-2")
    for worker in (good, bad):
        await put_on(worker)
    good.say(run_report=RunReport(run_id=run_id))
    bad.say(run_report=RunReport(run_id=run_id, error="no file 'f.py'", fault=FAULT_SPEC))
    message = "reward reward-2 cannot work on the run: no file 'f.py'. It is retried automatically"
    await plane.watch_until(run_id, "warning", message=message)
    await plane.coordinator.runs.faults.check(time.monotonic())
    assert (await state_of(plane, run_id)) == ("running", "")


async def test_a_drain_that_leaves_only_a_bad_worker_pauses_the_run_until_a_good_one_comes(
    running: tuple[Plane, str],
) -> None:
    plane, run_id = running
    good, bad = reward(plane, "reward-1"), reward(plane, "reward-2")
    for worker in (good, bad):
        await put_on(worker)
    good.say(run_report=RunReport(run_id=run_id))
    bad.say(run_report=RunReport(run_id=run_id, error="no file 'f.py'", fault=FAULT_SPEC))
    await plane.watch_until(run_id, "warning")
    plane.ledger.update_run(run_id, next_step=1)
    good.say(leave={})
    paused = await next_state(plane, run_id, 0, "paused")
    assert "no file 'f.py'" in (await state_of(plane, run_id))[1]
    another = reward(plane, "reward-3")
    await put_on(another)
    another.say(run_report=RunReport(run_id=run_id))
    await next_state(plane, run_id, paused, "running")


async def test_trouble_does_not_end_a_person_s_pause(running: tuple[Plane, str]) -> None:
    plane, run_id = running
    worker = reward(plane)
    await put_on(worker)
    worker.say(run_report=RunReport(run_id=run_id, error="no file", fault=FAULT_PASSING))
    paused = await next_state(plane, run_id, 0, "paused")
    await plane.runs.Pause(run_pb2.PauseRequest(run_id=run_id))
    await next_state(plane, run_id, paused, "paused")
    await plane.coordinator.runs.faults.check(time.monotonic())
    member = plane.coordinator.members.get("reward-1")
    assert member is not None
    member.ready_run, member.fault = run_id, None
    await plane.coordinator.runs.faults.check(time.monotonic())
    assert (await state_of(plane, run_id)) == ("paused", "")
    await plane.runs.Resume(run_pb2.ResumeRequest(run_id=run_id))
    assert (await state_of(plane, run_id)) == ("running", "")


async def test_the_spec_s_fault_fails_a_run_before_its_first_step_and_pauses_it_later(
    running: tuple[Plane, str],
) -> None:
    plane, run_id = running
    plane.ledger.update_run(run_id, next_step=1)
    worker = reward(plane)
    await put_on(worker)
    report = RunReport(run_id=run_id, error="reward function 'f' is not built in", fault=FAULT_SPEC)
    worker.say(run_report=report)
    await next_state(plane, run_id, 0, "paused")
    plane.ledger.update_run(run_id, next_step=0)
    await plane.watch_until(run_id, "state", state="failed")
    assert (await state_of(plane, run_id)) == ("failed", "reward: reward function 'f' is not built in")
    assert (await worker.hear("idle")).reason == f"run {run_id} failed"


async def test_a_learner_that_cannot_set_up_gets_new_sessions_until_it_can(
    running: tuple[Plane, str],
) -> None:
    plane, run_id = running
    worker = learner(plane)
    assert (await put_on(worker)).session == 1
    worker.say(run_report=RunReport(run_id=run_id, session=1, error="no mount", fault=FAULT_PASSING))
    paused = await next_state(plane, run_id, 0, "paused")
    assert (await put_on(worker)).session == 2
    assert (await state_of(plane, run_id))[0] == "paused"
    worker.say(run_report=RunReport(run_id=run_id, session=2))
    await next_state(plane, run_id, paused, "running")


async def test_a_learner_that_fails_while_a_dead_one_is_still_a_member_is_tried_again(
    running: tuple[Plane, str],
) -> None:
    plane, run_id = running
    dead = learner(plane, "learner-1")
    await put_on(dead)
    dead.hang_up()
    await dead.hear_the_end()
    member = plane.coordinator.members.get("learner-1")
    assert member is not None
    member.session = 0  # as if the session had ended before it died; otherwise it keeps it for the time-out
    worker = learner(plane, "learner-2")
    assert (await put_on(worker)).session == 2
    worker.say(run_report=RunReport(run_id=run_id, session=2, error="no mount", fault=FAULT_PASSING))
    await next_state(plane, run_id, 0, "paused")
    assert (await put_on(worker)).session == 3


async def test_another_rank_s_fault_is_the_session_s(running: tuple[Plane, str]) -> None:
    plane, run_id = running
    first, second = learner(plane, "learner-rank0", world_size=2), learner(plane, "learner-rank1", rank=1)
    assert (await put_on(first)).session == 1
    await second.hear("welcome")
    second.say(run_report=RunReport(run_id=run_id, session=1, error="no model here", fault=FAULT_PASSING))
    await next_state(plane, run_id, 0, "paused")
    assert "no model here" in (await state_of(plane, run_id))[1]
    assert (await put_on(first)).session == 2

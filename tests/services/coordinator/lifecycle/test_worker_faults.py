"""What keeps a run from going on pauses it with the reason, and it goes on by itself; only its spec can fail it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import yaml
from control_plane import Plane, Worker, learner, refusal, rollout
from exchange_drivers import make_spec
from paused_runs import impatient, next_state, state_of

from paceline.backoff import ExponentialBackoff
from paceline.rate_limited_log import unforeseen
from paceline.spec.reading import spec_to_yaml
from protos.paceline.v1 import common_pb2, run_pb2
from protos.paceline.v1.worker_pb2 import (
    FAULT_CHECKPOINT,
    FAULT_PASSING,
    FAULT_SPEC,
    FAULT_UNSPECIFIED,
    RunReport,
)
from services.coordinator.audit.verify import verify
from services.coordinator.exchange import leases
from services.coordinator.exchange.state import Notice
from services.coordinator.lifecycle.worker_faults import Verdict, explain, judge
from services.coordinator.members.registry import Fault, Member
from services.coordinator.reporting import run_log


@pytest_asyncio.fixture
async def running(tmp_path: Path) -> AsyncIterator[tuple[Plane, str]]:
    """A coordinator that tries again at once, with a run that has started."""
    plane = impatient(Plane(tmp_path))
    await plane.start()
    run = await plane.submit()
    plane.run_loops()
    await plane.watch_until(run.run_id, "state", state="running")
    yield plane, run.run_id
    await plane.stop()


def reward(plane: Plane, member_id: str = "reward-1") -> Worker:
    return Worker(plane, common_pb2.ROLE_REWARD, member_id)


async def put_on(worker: Worker) -> Any:
    return await worker.hear("run")


# The decision


def members(*faults: Fault | None) -> list[Member]:
    return [
        Member(f"reward-{i}", common_pb2.ROLE_REWARD, "", 0, 0.0, fault=fault)
        for i, fault in enumerate(faults)
    ]


def fault(
    kind: Any = FAULT_PASSING, run_id: str = "a-1", text: str = "away", *, resumable: bool = False
) -> Fault:
    return Fault(run_id, text, kind, resumable)


@pytest.mark.parametrize(
    ("faults", "next_step", "verdict"),
    [
        ([], 0, Verdict.GO_ON),
        ([None], 0, Verdict.GO_ON),
        ([fault(), None], 3, Verdict.GO_ON),
        ([fault(run_id="b-2")], 3, Verdict.GO_ON),
        ([fault()], 0, Verdict.RETRY),
        ([fault(FAULT_UNSPECIFIED)], 0, Verdict.RETRY),
        ([fault(FAULT_CHECKPOINT)], 3, Verdict.RETRY),
        ([fault(FAULT_SPEC)], 0, Verdict.FAIL),
        ([fault(FAULT_SPEC)], 1, Verdict.RETRY),
        ([fault(FAULT_SPEC), fault()], 0, Verdict.RETRY),
        ([fault(resumable=True)], 0, Verdict.ASK),
        ([fault(FAULT_SPEC, resumable=True)], 3, Verdict.ASK),
    ],
)
def test_what_faults_mean(faults: list[Fault | None], next_step: int, verdict: Verdict) -> None:
    assert judge(members(*faults), "a-1", next_step) is verdict


def test_the_reason_names_what_each_says() -> None:
    assert explain(members(fault(), fault())) == "reward: away"
    assert explain(members(fault(), fault(text="no file"))) == "reward: reward-0: away; reward-1: no file"
    many = members(*(fault(text=str(i)) for i in range(9)))
    assert explain(many).endswith("reward-4: 4; and 4 more faults")


def test_pauses_grow_to_a_bound_and_begin_anew() -> None:
    pause = ExponentialBackoff()
    assert [pause.next_s() for _ in range(6)] == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    pause.reset()
    assert pause.next_s() == 5.0


# Data sets


async def test_a_run_whose_data_set_is_away_waits_for_it(tmp_path: Path) -> None:
    plane = impatient(Plane(tmp_path))
    await plane.start()
    try:
        run = await plane.submit()
        (tmp_path / "train.jsonl").rename(tmp_path / "moved.jsonl")
        plane.run_loops()
        paused = await next_state(plane, run.run_id, 0, "paused")
        state, message = await state_of(plane, run.run_id)
        assert state == "paused"
        assert "no file" in message
        assert "tried again by itself" in message
        (tmp_path / "moved.jsonl").rename(tmp_path / "train.jsonl")
        await next_state(plane, run.run_id, paused, "running")
        assert (await state_of(plane, run.run_id)) == ("running", "")
    finally:
        await plane.stop()


async def test_a_data_set_that_is_away_when_the_coordinator_comes_back_ends_nothing(tmp_path: Path) -> None:
    plane = Plane(tmp_path)
    await plane.start()
    run = await plane.submit()
    plane.run_loops()
    await plane.watch_until(run.run_id, "state", state="running")
    await plane.stop()
    (tmp_path / "train.jsonl").rename(tmp_path / "moved.jsonl")
    again = Plane(tmp_path)
    await again.start()
    await again.stop()
    (tmp_path / "moved.jsonl").rename(tmp_path / "train.jsonl")
    third = Plane(tmp_path)
    await third.start()
    try:
        assert third.coordinator.exchange.active is not None
        assert (await state_of(third, run.run_id)) == ("running", "")
    finally:
        await third.stop()


@pytest.mark.parametrize("changed", [True, False])
async def test_a_data_set_that_was_changed_between_two_lives_is_warned_of(
    tmp_path: Path, changed: bool
) -> None:
    plane = Plane(tmp_path)
    await plane.start()
    run = await plane.submit()
    plane.run_loops()
    await plane.watch_until(run.run_id, "state", state="running")
    await plane.stop()
    train = tmp_path / "train.jsonl"
    train.write_text(train.read_text() + ('{"prompt": "another", "answer": 7}\n' if changed else ""))
    again = Plane(tmp_path)
    await again.start()
    rows = again.ledger.db.execute("SELECT json FROM events WHERE kind = 'warning'").fetchall()
    await again.stop()
    messages = [json.loads(row["json"])["message"] for row in rows]
    assert [
        f"the data set '{train}' is not what it was when the run began (7 rows, " in m for m in messages
    ] == [True] * changed


async def test_a_run_whose_folder_cannot_be_written_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = Plane(tmp_path)
    await plane.start()
    run = await plane.submit()
    plane.run_loops()
    await plane.watch_until(run.run_id, "state", state="running")
    await plane.stop()

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", "metrics.jsonl")

    with monkeypatch.context() as patch:
        patch.setattr(run_log, "MetricsFiles", refuse)
        again = impatient(Plane(tmp_path))
        await again.start()
    try:
        state, message = await state_of(again, run.run_id)
        assert state == "paused"
        assert "Permission denied: 'metrics.jsonl'" in message
        again.run_loops()
        await next_state(again, run.run_id, 2, "running")
        await put_on(reward(again))
    finally:
        await again.stop()


async def test_a_summary_that_cannot_be_written_keeps_no_run_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = Plane(tmp_path)
    await plane.start()
    first, second = await plane.submit(), await plane.submit(name="other")
    await plane.coordinator._start_next()
    worker = reward(plane)
    await put_on(worker)

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(run_log, "write_summary", refuse)
        await plane.runs.Cancel(run_pb2.CancelRequest(run_id=first.run_id))
        await worker.hear("idle")
        await plane.coordinator._start_next()
        assert (await put_on(worker)).run_id == second.run_id
        await plane.stop()
        again = Plane(tmp_path)
        await again.start()  # it tries to write what is missing
        assert (await state_of(again, second.run_id))[0] == "running"
        await again.stop()
    third = Plane(tmp_path)
    await third.start()
    assert json.loads((Path(first.directory) / "summary.json").read_text())["state"] == "cancelled"
    await third.stop()


@pytest.mark.parametrize("ended", [True, False])
async def test_the_damaged_result_of_an_evaluation_keeps_no_coordinator_from_starting(
    tmp_path: Path, ended: bool
) -> None:
    plane = Plane(tmp_path)
    await plane.start()
    run = await plane.submit()
    if ended:
        await plane.runs.Cancel(run_pb2.CancelRequest(run_id=run.run_id))
    await plane.stop()
    plane = Plane(tmp_path)
    plane.ledger.db.execute(
        "INSERT INTO evaluations (run_id, step, done, result_json) VALUES (?, 0, 1, '{')", (run.run_id,)
    )
    (Path(run.directory) / "summary.json").unlink(missing_ok=True)
    before = unforeseen.total
    await plane.start()
    assert unforeseen.total == before + ended
    state, _ = await state_of(plane, run.run_id)
    await plane.stop()
    assert state == ("cancelled" if ended else "running")


async def test_workers_keep_what_they_hold_until_the_run_can_be_taken_up(tmp_path: Path) -> None:
    plane = Plane(tmp_path)
    await plane.start()
    run = await plane.submit()
    plane.run_loops()
    await plane.watch_until(run.run_id, "state", state="running")
    session = (await put_on(learner(plane))).session
    await plane.stop()
    (tmp_path / "train.jsonl").rename(tmp_path / "moved.jsonl")
    again = impatient(Plane(tmp_path))
    await again.start()
    try:
        code, details = await refusal(learner(again, session=session, run_id=run.run_id).call.read())
        assert code is grpc.StatusCode.UNAVAILABLE, "it comes back, and is not told that its run is over"
        assert "no file" in details
        (tmp_path / "moved.jsonl").rename(tmp_path / "train.jsonl")
        again.run_loops()
        await next_state(again, run.run_id, 2, "running")
        back = learner(again, session=session, run_id=run.run_id)
        await back.hear("epoch")
        assert again.ledger.run(run.run_id)["session"] == session
    finally:
        await again.stop()


async def test_a_person_s_pause_outlives_a_data_set_that_was_away(tmp_path: Path) -> None:
    plane = Plane(tmp_path)
    await plane.start()
    run = await plane.submit()
    plane.run_loops()
    await plane.watch_until(run.run_id, "state", state="running")
    await plane.runs.Pause(run_pb2.PauseRequest(run_id=run.run_id))
    await plane.stop()
    (tmp_path / "train.jsonl").rename(tmp_path / "moved.jsonl")
    again = impatient(Plane(tmp_path))
    await again.start()
    try:
        (tmp_path / "moved.jsonl").rename(tmp_path / "train.jsonl")
        await again.coordinator._start_next()
        assert again.coordinator.exchange.active is not None
        assert (await state_of(again, run.run_id)) == ("paused", "")
    finally:
        await again.stop()


async def test_a_row_that_no_waiting_repairs_fails_a_run_that_has_not_begun_and_resume_takes_it_up(
    plane: Plane,
) -> None:
    first, second = await plane.submit(), await plane.submit(name="other")
    train = plane.directory / "train.jsonl"
    rows = train.read_text()
    train.write_text('{"prompt": 7}\n')
    await plane.coordinator._start_next()
    assert (await state_of(plane, first.run_id))[0] == "failed"
    train.write_text(rows)
    await plane.coordinator._start_next()
    assert (await state_of(plane, second.run_id))[0] == "running"
    resumed = await plane.runs.Resume(run_pb2.ResumeRequest(run_id=first.run_id))
    assert resumed.run.state == run_pb2.RUN_STATE_QUEUED
    await plane.coordinator._start_next()
    assert (await state_of(plane, first.run_id))[0] == "queued", "the other one trains"
    await plane.runs.Cancel(run_pb2.CancelRequest(run_id=second.run_id))
    await plane.coordinator._start_next()
    assert (await state_of(plane, first.run_id)) == ("running", "")


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
    assert (state, message) == ("paused", "reward: there is no file 'f.py'. It is tried again by itself")
    worker.say(run_report=RunReport(run_id=run_id))
    await next_state(plane, run_id, paused, "running")
    assert (await state_of(plane, run_id)) == ("running", "")


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
    message = "reward reward-2 cannot work on the run: no file 'f.py'. It is tried again by itself"
    await plane.watch_until(run_id, "warning", message=message)
    await plane.coordinator.faults.look(time.monotonic())
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
    await plane.coordinator.faults.look(time.monotonic())
    member = plane.coordinator.members.get("reward-1")
    assert member is not None
    member.ready_run, member.fault = run_id, None
    await plane.coordinator.faults.look(time.monotonic())
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
    member.session = 0  # as if the session had ended before it died; else it keeps it for the time-out
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


# What a failed run keeps, and how it goes on


async def test_a_failed_run_keeps_its_groups_until_it_is_cancelled(running: tuple[Plane, str]) -> None:
    plane, run_id = running
    coordinator, ledger = plane.coordinator, plane.ledger
    async with coordinator.lock:
        with ledger.transaction():
            assert coordinator.exchange.active is not None
            leases.admit(coordinator.exchange, coordinator.exchange.active, 4)
            ledger.db.execute(
                "UPDATE groups SET state = 'leased', member_id = 'rollout-1' WHERE group_id = 0 AND run_id = ?",
                (run_id,),
            )
    await coordinator.fail(run_id, "no such function")
    assert ledger.groups_by_state(run_id)["admitted"] == 4, "nobody holds them any more"
    assert verify(ledger, run_id).problems == []
    await plane.runs.Resume(run_pb2.ResumeRequest(run_id=run_id))
    await plane.watch_until(run_id, "state", state="running")
    await coordinator.fail(run_id, "no such function")
    await plane.runs.Cancel(run_pb2.CancelRequest(run_id=run_id))
    groups = ledger.groups_by_state(run_id)
    assert (groups["admitted"], groups["dropped:run_ended"]) == (0, 4)
    assert verify(ledger, run_id).problems == []


async def test_a_notice_of_one_run_does_nothing_to_the_next(running: tuple[Plane, str]) -> None:
    plane, run_id = running
    late = Notice("failed", {"message": "nothing could train"}, "earlier-7")
    await plane.coordinator.act_on([late])
    assert (await state_of(plane, run_id)) == ("running", "")
    await plane.coordinator.act_on([Notice("failed", {"message": "nothing could train"}, run_id)])
    assert (await state_of(plane, run_id)) == ("paused", "nothing could train")
    plane.ledger.update_run(run_id, dropped_in_a_row=7)
    await plane.runs.Resume(run_pb2.ResumeRequest(run_id=run_id))
    assert plane.ledger.run(run_id)["dropped_in_a_row"] == 0


# Specs of other versions


def change_spec(plane: Plane, run_id: str, **sections: Any) -> None:
    tree = yaml.safe_load(spec_to_yaml(make_spec(plane.directory))) | sections
    plane.ledger.update_run(run_id, spec_yaml=yaml.safe_dump(tree))


async def test_keys_that_only_another_version_knows_are_kept_and_warned_of(plane: Plane) -> None:
    run = await plane.submit()
    data = {"train": str(plane.directory / "train.jsonl"), "lookahead": 3}
    change_spec(plane, run.run_id, data=data, telepathy={"on": True})
    plane.run_loops()
    await plane.watch_until(run.run_id, "warning")
    (event,) = [e for e in plane.ledger.events(run.run_id, 0) if e["kind"] == "warning"]
    assert "data.lookahead" in event["json"]
    assert "telepathy" in event["json"]
    assert "telepathy" in plane.ledger.run(run.run_id)["spec_yaml"]
    worker = rollout(plane)
    told = yaml.safe_load((await put_on(worker)).spec_yaml)
    assert "telepathy" not in told
    assert "lookahead" not in told["data"]


async def test_a_spec_that_cannot_be_understood_pauses_its_run_and_the_coordinator_starts(
    tmp_path: Path,
) -> None:
    plane = Plane(tmp_path)
    await plane.start()
    run = await plane.submit()
    plane.run_loops()
    await plane.watch_until(run.run_id, "state", state="running")
    good = plane.ledger.run(run.run_id)["spec_yaml"]
    change_spec(plane, run.run_id, grpo={"num_prompts_per_step": "many"})
    await plane.stop()
    again = impatient(Plane(tmp_path))
    await again.start()
    try:
        row = again.ledger.run(run.run_id)
        assert row["state"] == "paused"
        assert "grpo.num_prompts_per_step" in row["message"]
        again.ledger.update_run(run.run_id, spec_yaml=good)
        again.run_loops()
        await next_state(again, run.run_id, 0, "paused")
        async with again.coordinator.changed:
            await again.coordinator.changed.wait_for(
                lambda: again.ledger.run(run.run_id)["state"] == "running"
            )
    finally:
        await again.stop()

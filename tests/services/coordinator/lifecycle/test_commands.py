"""Commands of a person on runs: each concerns one run, and groups are dropped only while it is paused."""

from __future__ import annotations

from pathlib import Path

import grpc
from control_plane import Plane, refusal
from paused_runs import state_of

from paceline.v1 import run_pb2


async def test_to_resume_one_run_forgets_no_pause_of_another(tmp_path: Path) -> None:
    plane = await Plane.started(tmp_path)
    try:
        first, second = (await plane.submit()).run_id, (await plane.submit()).run_id
        await plane.coordinator.runs.states.fail(first, "no function 'f'")
        await plane.coordinator.runs.starter.start_next()
        await plane.coordinator.runs.pause_on_fault(second, "reward: away", retried=True)
        resumed = (await plane.runs.Resume(run_pb2.ResumeRequest(run_id=first))).run
        assert resumed.state == run_pb2.RUN_STATE_QUEUED
        await plane.coordinator.runs.states.continue_run(second)
        assert (await state_of(plane, second))[0] == "running"
    finally:
        await plane.stop()


async def test_groups_are_dropped_only_while_the_run_is_paused_and_has_a_batch(plane: Plane) -> None:
    plane.run_loops()
    run = await plane.submit()
    await plane.watch_until(run.run_id, "state", state="running")
    request = run_pb2.DropGroupsRequest(run_id=run.run_id, group_ids=[1])
    code, text = await refusal(plane.runs.DropGroups(request))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert text == f"run {run.run_id} is running; groups are dropped only while it is paused (`paceline pause`)"
    await plane.runs.Pause(run_pb2.PauseRequest(run_id=run.run_id))
    code, text = await refusal(plane.runs.DropGroups(request))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "has no batch that is fixed and not trained; its next step is 0" in text
    code, _ = await refusal(plane.runs.DropGroups(run_pb2.DropGroupsRequest(run_id="no-1", group_ids=[1])))
    assert code == grpc.StatusCode.NOT_FOUND


async def test_a_run_that_has_ended_is_not_cancelled_again(plane: Plane) -> None:
    run = await plane.submit()
    request = run_pb2.CancelRequest(run_id=run.run_id)
    await plane.runs.Cancel(request)
    code, text = await refusal(plane.runs.Cancel(request))
    assert (code, text) == (grpc.StatusCode.FAILED_PRECONDITION, f"run {run.run_id} was already cancelled")

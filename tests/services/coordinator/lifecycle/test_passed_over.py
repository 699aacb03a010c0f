"""A run whose spec this version cannot read: others go first, it keeps what is open, and goes on with a version that can."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from control_plane import DEADLINE_S, Plane, refusal
from paused_runs import impatient, next_state, state_of

from protos.paceline.v1 import run_pb2
from services.coordinator.ledger.ledger import Ledger
from services.coordinator.lifecycle import coordinator

UNREADABLE = (
    "{policy: {model_name: m}, data: {train: d}, rewards: [{function: length}], grpo: {max_num_steps: lots}}"
)


def spell(directory: Path, run_id: str, spec_yaml: str) -> str:
    """Another version has written the run's spec; returns the one before."""
    ledger = Ledger(directory / "ledger.sqlite")
    before = str(ledger.run(run_id)["spec_yaml"])
    with ledger.transaction():
        ledger.update_run(run_id, spec_yaml=spec_yaml)
    ledger.close()
    return before


@contextlib.asynccontextmanager
async def life(directory: Path) -> AsyncIterator[Plane]:
    """One life of the coordinator."""
    plane = impatient(Plane(directory))
    await plane.start()
    plane.run_loops()
    try:
        yield plane
    finally:
        await plane.stop()


async def test_other_runs_go_first_and_it_goes_on_where_it_can_be_read(tmp_path: Path) -> None:
    async with life(tmp_path) as plane:
        first, second = (await plane.submit()).run_id, (await plane.submit()).run_id
        await plane.watch_until(first, "state", state="running")
    spec = spell(tmp_path, first, UNREADABLE)

    async with life(tmp_path) as plane:
        await plane.watch_until(second, "state", state="running")
        state, message = await state_of(plane, first)
        assert state == "paused"
        assert "cannot read the spec of run test-1: grpo.max_num_steps" in message
        assert message.endswith("end it with `paceline cancel test-1`. Other runs go first")
        seen = await plane.watch_until(first, "state", state="paused")
        await plane.runs.Cancel(run_pb2.CancelRequest(run_id=second))
        third = (
            await plane.submit()
        ).run_id  # the first was alone for a moment, and is still in nobody's way
        await plane.watch_until(third, "state", state="running")
    spell(tmp_path, first, spec)

    async with life(tmp_path) as plane:
        assert (await state_of(plane, third))[0] == "running", "the active run stays it"
        await plane.runs.Cancel(run_pb2.CancelRequest(run_id=third))
        await next_state(plane, first, seen[-1][0], "running")
        assert await state_of(plane, first) == ("running", "")


async def test_it_may_be_resumed_and_cancelled_while_another_trains(tmp_path: Path) -> None:
    async with life(tmp_path) as plane:
        first, second = (await plane.submit()).run_id, (await plane.submit()).run_id
    spell(tmp_path, first, UNREADABLE)
    async with life(tmp_path) as plane:
        await plane.watch_until(second, "state", state="running")
        resumed = (await plane.runs.Resume(run_pb2.ResumeRequest(run_id=first))).run
        assert resumed.state == run_pb2.RUN_STATE_QUEUED, "one run trains at a time"
        cancelled = (await plane.runs.Cancel(run_pb2.CancelRequest(run_id=first))).run
        assert cancelled.state == run_pb2.RUN_STATE_CANCELLED
        assert (await state_of(plane, second))[0] == "running"


async def test_a_person_s_pause_outlives_another_version(tmp_path: Path) -> None:
    async with life(tmp_path) as plane:
        first = (await plane.submit()).run_id
        await plane.watch_until(first, "state", state="running")
        await plane.runs.Pause(run_pb2.PauseRequest(run_id=first))
        second = (await plane.submit()).run_id
    spec = spell(tmp_path, first, UNREADABLE)
    async with life(tmp_path) as plane:
        await plane.watch_until(second, "state", state="running")
        await plane.runs.Cancel(run_pb2.CancelRequest(run_id=second))
    spell(tmp_path, first, spec)
    async with life(tmp_path) as plane:
        assert (await state_of(plane, first))[0] == "paused"


async def test_to_resume_one_run_forgets_no_pause_of_another(tmp_path: Path) -> None:
    plane = Plane(tmp_path)
    await plane.start()
    try:
        first, second = (await plane.submit()).run_id, (await plane.submit()).run_id
        await plane.coordinator.fail(first, "no function 'f'")
        await plane.coordinator._start_next()
        await plane.coordinator.pause_on_fault(second, "reward: away", retried=True)
        resumed = (await plane.runs.Resume(run_pb2.ResumeRequest(run_id=first))).run
        assert resumed.state == run_pb2.RUN_STATE_QUEUED
        await plane.coordinator.take_up(second)
        assert (await state_of(plane, second))[0] == "running"
    finally:
        await plane.stop()


async def test_specs_beyond_those_that_are_being_read_are_turned_away(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "MAX_TO_READ", 1)
    async with plane.coordinator._reading:  # somebody's spec takes its time
        first = asyncio.create_task(plane.submit())
        async with asyncio.timeout(DEADLINE_S):
            while not plane.coordinator._to_read:  # noqa: ASYNC110 - a request on its way has no event
                await asyncio.sleep(0.01)
        code, details = await refusal(plane.submit())
        assert code.name == "RESOURCE_EXHAUSTED"
        assert "1 specs are being read" in details
    assert (await first).run_id == "test-1"

"""A data set that takes long to open is opened once for a submission, however often the client asks."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
import pytest
from control_plane import Plane
from exchange_drivers import make_spec

from paceline.errors import Busy, DataError
from paceline.spec.reading import spec_to_yaml
from protos.paceline.v1 import run_pb2
from services.coordinator.lifecycle import coordinator as coordinator_module
from services.coordinator.lifecycle.dataset_openings import MAX_OPENINGS, Openings

PATIENCE_S = 30.0


async def test_a_client_that_asks_again_joins_the_opening_that_is_under_way(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, go = threading.Semaphore(0), threading.Event()
    calls = 0

    def slowly(spec: Any) -> Any:
        nonlocal calls
        calls += 1
        opened.release()
        assert go.wait(PATIENCE_S)
        return None, None

    monkeypatch.setattr(coordinator_module, "_open_data", slowly)
    text = spec_to_yaml(make_spec(plane.directory))
    request = run_pb2.SubmitRequest(spec_yaml=text, submission="one")
    first = plane.runs.Submit(request, timeout=0.5)
    assert await asyncio.to_thread(opened.acquire, True, PATIENCE_S)
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await first
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    second = asyncio.ensure_future(plane.runs.Submit(request))
    await asyncio.sleep(0)
    go.set()
    run = (await asyncio.wait_for(second, PATIENCE_S)).run
    assert calls == 1
    again = (await plane.runs.Submit(request)).run
    assert again.run_id == run.run_id
    assert calls == 1, "a run that is queued is not opened again"


async def test_a_fault_is_told_to_whoever_asks_and_the_next_try_begins_anew() -> None:
    openings, faults = Openings(), [DataError("line 3")]

    def work() -> None:
        if faults:
            raise faults.pop()

    with pytest.raises(DataError, match="line 3"):
        await openings.open("one", work)
    await openings.open("one", work)
    assert openings._tasks == {}


async def test_openings_are_bounded_and_an_outcome_that_nobody_took_makes_room() -> None:
    openings, go = Openings(), threading.Event()
    loop = asyncio.get_running_loop()
    waiting = [
        loop.create_task(openings.open(str(number), lambda: go.wait(PATIENCE_S)))
        for number in range(MAX_OPENINGS)
    ]
    await asyncio.sleep(0)
    with pytest.raises(Busy):
        await openings.open("one more", lambda: None)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    go.set()
    await asyncio.wait(openings._tasks.values())
    await openings.open("one more", lambda: None)
    assert len(openings._tasks) == MAX_OPENINGS - 1

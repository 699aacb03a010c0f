"""Openings of data sets: errors reach the caller, and their number is bounded."""

from __future__ import annotations

import asyncio
import threading

import pytest

from paceline.errors import Busy, DataError
from paceline.services.coordinator.lifecycle.run_data import MAX_OPENINGS, Openings

PATIENCE_S = 60.0


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
        loop.create_task(openings.open(str(number), lambda: go.wait(PATIENCE_S))) for number in range(MAX_OPENINGS)
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

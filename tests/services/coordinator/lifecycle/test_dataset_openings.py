"""Openings of data sets: errors reach the caller, and their number is bounded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable

import pytest

from paceline.errors import Busy, DataError, Unreadable
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
    assert await openings.open("one", lambda: "anew") == "anew", "an outcome is given once"


async def refused(opening: Awaitable[object]) -> bool:
    try:
        await opening
    except Busy:
        return True
    return False


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
    async with asyncio.timeout(PATIENCE_S):
        while await refused(openings.open("one more", lambda: None)):  # noqa: ASYNC110 - the end of an opening has no event
            await asyncio.sleep(0.01)
    outcomes = [await openings.open(str(number), lambda: "anew") for number in range(MAX_OPENINGS)]
    assert sorted(map(str, outcomes)) == [*["True"] * (MAX_OPENINGS - 1), "anew"], "one outcome was deleted, no more"


async def test_openings_that_never_end_leave_the_threads_of_others_alone() -> None:
    openings, go = Openings(), threading.Event()
    waiting = [asyncio.create_task(openings.open(str(number), go.wait)) for number in range(MAX_OPENINGS)]
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.to_thread(lambda: "answered") == "answered"
    finally:
        go.set()
        await asyncio.wait(waiting)


async def test_an_opening_that_takes_too_long_is_unreadable_and_joined_by_the_next_call() -> None:
    openings, go = Openings(), threading.Event()
    try:
        with pytest.raises(Unreadable, match="still being opened"):
            await openings.open("one", go.wait, limit_s=0.01)
    finally:
        go.set()
    assert await openings.open("one", lambda: "anew") is True, "the first thread's outcome"
    with pytest.raises(TimeoutError, match="the store's own"):
        await openings.open("one", raise_timeout)


async def test_a_thread_that_never_ends_keeps_its_place_after_its_caller_gave_up() -> None:
    openings, go = Openings(), threading.Event()
    try:
        for number in range(MAX_OPENINGS):
            with pytest.raises(Unreadable):
                await openings.open(number, go.wait, limit_s=0.0)
        with pytest.raises(Busy):
            await openings.open("one more", go.wait, limit_s=0.0)
    finally:
        go.set()


async def test_an_outcome_that_nobody_needs_is_dropped() -> None:
    openings, go = Openings(), threading.Event()
    with pytest.raises(Unreadable):
        await openings.open("cancelled", go.wait, limit_s=0.0)
    openings.drop(lambda name: False)
    assert list(openings._threads) == ["cancelled"], "its thread runs"
    thread = openings._threads["cancelled"]
    go.set()
    await thread
    openings.drop(lambda name: True)
    assert list(openings._threads) == ["cancelled"]
    openings.drop(lambda name: False)
    assert not openings._threads


def raise_timeout() -> None:
    raise TimeoutError("the store's own")

"""A pipeline thread processes each item once, in order, and raises the error that ends it."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from paceline.services.coordinator.exchange.transport.pipeline_thread import PipelineThread


async def test_what_piles_up_is_the_next_portion() -> None:
    begun, go_on, portions, ended = threading.Event(), threading.Event(), [], asyncio.Event()

    def work(portion: list[int]) -> None:
        assert threading.current_thread() is not threading.main_thread()
        begun.set()
        go_on.wait(60)

    def then(portion: list[int]) -> None:
        assert threading.current_thread() is threading.main_thread()
        portions.append(portion)
        if portion[-1] == 9:
            ended.set()

    thread = PipelineThread("test", work, then, size=lambda item: item, portion_size=6)
    running = asyncio.create_task(thread.run())
    thread.put(0)
    await asyncio.to_thread(begun.wait, 20)
    for item in range(1, 10):
        thread.put(item)
    go_on.set()
    await asyncio.wait_for(ended.wait(), 20)
    assert portions == [[0], [1, 2, 3], [4, 5], [6], [7], [8], [9]]
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert "test" not in {thread.name for thread in threading.enumerate()}


async def test_a_failure_ends_it_and_reaches_the_one_who_waits() -> None:
    def work(portion: list[str]) -> None:
        raise OSError("the disk is gone")

    thread = PipelineThread("test", work, lambda portion: pytest.fail("it was not done"))
    thread.put("before it runs")
    with pytest.raises(OSError, match="the disk is gone"):
        await asyncio.wait_for(thread.run(), 20)


async def test_a_portion_under_way_is_finished_when_it_is_cancelled() -> None:
    begun, done = threading.Event(), []

    def work(portion: list[int]) -> None:
        begun.set()
        done.append(portion)

    thread = PipelineThread("test", work)
    running = asyncio.create_task(thread.run())
    thread.put(1)
    await asyncio.to_thread(begun.wait, 20)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert done == [[1]]

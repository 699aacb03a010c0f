"""The thread of an engine: work is done, or its caller gets the reason why not."""

from __future__ import annotations

import asyncio
import threading

import pytest

from paceline.errors import EngineDied, Unavailable
from paceline.rollout.vllm.engine_thread import EngineThread


class Life:
    """An engine that lives until it is closed or ordered to die."""

    def __init__(self) -> None:
        self.thread = EngineThread(self.live, self.at_end)
        self.die = False
        self.ends = 0
        self.thread.start()

    async def live(self) -> None:
        self.thread.started.set_result(None)
        while not self.thread.closing:
            if self.die:
                raise RuntimeError("struck down")
            await asyncio.sleep(0)

    def at_end(self) -> None:
        self.ends += 1


async def forever() -> None:
    await asyncio.Event().wait()


async def test_work_runs_on_the_threads_loop_and_its_result_comes_back() -> None:
    life = Life()

    async def work() -> int:
        return threading.get_ident()

    assert await life.thread.result(life.thread.submit(work())) != threading.get_ident()
    called: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    life.thread.call(lambda: loop.call_soon_threadsafe(called.put_nowait, 3))
    assert await called.get() == 3
    life.thread.closing = True
    life.thread.join()


async def test_closing_ends_it_and_refuses_what_waits_and_what_comes() -> None:
    life = Life()
    waiting = life.thread.submit(forever())
    life.thread.closing = True
    life.thread.join()
    assert (life.thread.ended.result(), life.ends) == (None, 1)
    with pytest.raises(Unavailable, match="closed"):
        await life.thread.result(waiting)
    with pytest.raises(Unavailable, match="closed"):
        life.thread.submit(forever())
    life.thread.call(pytest.fail)


async def test_its_death_is_the_reason_for_everybody() -> None:
    life = Life()
    waiting = life.thread.submit(forever())
    life.die = True
    life.thread.join()
    assert life.ends == 1
    with pytest.raises(EngineDied, match="struck down"):
        life.thread.ended.result()
    with pytest.raises(EngineDied, match="struck down"):
        await life.thread.result(waiting)
    with pytest.raises(EngineDied, match="struck down"):
        life.thread.submit(forever())


async def test_a_death_before_the_start_is_the_starts_outcome() -> None:
    async def live() -> None:
        raise RuntimeError("stillborn")

    thread = EngineThread(live, lambda: None)
    thread.start()
    thread.join()
    with pytest.raises(EngineDied, match="stillborn"):
        thread.started.result()


async def test_a_callers_cancellation_stays_one() -> None:
    life = Life()
    task = asyncio.create_task(life.thread.result(life.thread.submit(forever())))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    life.thread.closing = True
    life.thread.join()

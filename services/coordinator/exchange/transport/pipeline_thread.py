"""Runs one step of a pipeline on a thread; the other steps run on the event loop or on other threads. Items that arrive
while it works form its next portion, and finished ones are posted at once, so it never waits for a turn of the event
loop, which under load lasts as long as a transaction."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class PipelineThread(Generic[ItemT]):
    """A thread that calls `work` with one portion of items after another; the event loop then calls `then` with the
    portion. A portion is all waiting items, cut off once its items together have `portion_size`."""

    def __init__(
        self,
        name: str,
        work: Callable[[list[ItemT]], None],
        then: Callable[[list[ItemT]], None] = lambda portion: None,
        *,
        size: Callable[[ItemT], int] = lambda item: 1,
        portion_size: int = 1,
    ):
        self._name, self._work, self._then = name, work, then
        self._size, self._portion_size = size, portion_size
        self._items: SimpleQueue[ItemT | None] = SimpleQueue()
        self.ending = threading.Event()
        """Set when the thread must end. A `work` that waits must then stop waiting and return."""

    def put(self, item: ItemT) -> None:
        """Add an item. May be called from any thread, also before `run`."""
        self._items.put(item)

    async def run(self) -> None:
        """Run the thread until cancelled; the current portion is finished first. An error of `work`
        ends the thread and is raised here."""
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[None] = loop.create_future()
        thread = threading.Thread(target=self._loop, args=(loop, failed), name=self._name)
        thread.start()
        try:
            await failed
        finally:
            self.ending.set()
            self._items.put(None)
            thread.join()

    def _loop(self, loop: asyncio.AbstractEventLoop, failed: asyncio.Future[None]) -> None:
        try:
            while portion := self._next():
                self._work(portion)
                loop.call_soon_threadsafe(self._then, portion)
        except BaseException as error:
            loop.call_soon_threadsafe(_fail, failed, error)

    def _next(self) -> list[ItemT]:
        """Return the next portion; empty if the thread has to end."""
        portion: list[ItemT] = []
        size = 0
        while size < self._portion_size:
            try:
                item = self._items.get(block=not portion)
            except Empty:
                break
            if item is None:
                return []
            portion.append(item)
            size += self._size(item)
        return portion


def _fail(failed: asyncio.Future[None], error: BaseException) -> None:
    if not failed.done():  # cancelled before
        failed.set_exception(error)

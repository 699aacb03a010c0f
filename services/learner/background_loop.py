"""An asyncio loop in a thread, for a process whose main thread computes: the learner's connection to the rest."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class BackgroundLoop:
    """Loop for coroutines beside the main thread. The next `check` raises an error that ended one of them."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="background", daemon=True)
        self._tasks: list[concurrent.futures.Future[Any]] = []
        self._closing = threading.Lock()
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine for as long as the loop lives."""
        self._tasks.append(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    def check(self) -> None:
        """Raise the error that ended a started coroutine, if any."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    def wait(
        self,
        coroutine: Coroutine[Any, Any, ResultT],
        timeout_s: float,
        stopping: threading.Event | None = None,
        grace_s: float = 0.0,
    ) -> ResultT:
        """Return the coroutine's result, and check the started coroutines meanwhile. Raises TimeoutError after `timeout_s`, or
        `grace_s` after `stopping` was set, whichever comes first.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        deadline_s, shortened = time.monotonic() + timeout_s, False
        try:
            while (left_s := deadline_s - time.monotonic()) > 0:
                done, _ = concurrent.futures.wait([future], timeout=min(1.0, left_s))
                if done:
                    return future.result()
                self.check()
                if stopping is not None and stopping.is_set() and not shortened:
                    shortened, deadline_s = True, min(deadline_s, time.monotonic() + grace_s)
            raise TimeoutError("no answer in time")
        finally:
            future.cancel()

    def post(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine without waiting, from any thread. Do nothing after `close`."""
        with self._closing:
            if self.loop.is_closed():
                coroutine.close()
            else:
                asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the loop without waiting, from any thread. Do nothing after `close`."""
        with self._closing:
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Cancel everything, and end the thread and its loop."""
        if self.loop.is_closed():
            return
        for task in self._tasks:
            task.cancel()
        concurrent.futures.wait(self._tasks, timeout=3.0)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=3.0)
        if not self._thread.is_alive():  # else a callback hangs, and the process ends without it
            with self._closing:
                self.loop.close()

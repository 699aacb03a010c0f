"""A thread with the asyncio loop of an engine: callers submit work, and if the engine has ended they get the reason.

The engine's coroutine runs on the loop from the thread's start to its end. Callers on other loops wait for futures, so
that the engine never blocks them. At its end all waiting callers get the reason, and later work is refused.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from paceline.errors import EngineDied, Unavailable

ResultT = TypeVar("ResultT")
log = logging.getLogger(__name__)


class EngineThread:
    """Thread that runs `live` after `start`. At its end `at_end` is called, then waiting callers are answered."""

    def __init__(self, live: Callable[[], Coroutine[Any, Any, None]], at_end: Callable[[], object]) -> None:
        self.started: Future[None] = Future()
        """Future that `live` completes; fails with Unavailable if the engine was closed before, with EngineDied if it
        died before."""
        self.ended: Future[None] = Future()
        self.error: BaseException | None = None
        self.closing = False
        """True once a caller ends the engine; `live` checks it."""
        self._live = live
        self._at_end = at_end
        self._gate = threading.Lock()
        self._over = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """Run `work` on the engine's loop. Raises EngineDied or Unavailable once the engine has died or was closed."""
        with self._gate:
            if not self._over:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        self.refuse_if_ended()
        raise Unavailable("the engine is closed")

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call `function` on the engine's loop if it still runs."""
        with self._gate:
            if not self._over:
                self._loop.call_soon_threadsafe(function, *arguments)

    async def result(self, future: Future[ResultT]) -> ResultT:
        """Return the result of submitted work; if the work was cancelled because the engine ended, raise the reason of
        that end."""
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._over and not (task and task.cancelling()):
                self.refuse_if_ended()
            raise

    def refuse_if_ended(self) -> None:
        """Raise EngineDied if the engine has died, Unavailable if it was closed."""
        if self.error is not None:
            raise died(self.error)
        if self.closing:
            raise Unavailable("the engine is closed")

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._live())
        except BaseException as error:
            if not self.closing:
                log.exception("the engine died")
                self.error = error
        self._at_end()
        with self._gate:
            self._over = True
        # Work that was submitted last becomes a task in the first round, and is cancelled in the second.
        for round_ in range(2):
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0.01 * round_))
        self._loop.close()
        self._tell()

    def _tell(self) -> None:
        reason = None if self.error is None else died(self.error)
        if not self.started.done():
            self.started.set_exception(reason or Unavailable("the engine was closed while it started"))
        if reason is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(reason)


def died(error: BaseException) -> EngineDied:
    """Return the error that callers get after `error` has ended the engine."""
    if isinstance(error, EngineDied):
        return error
    reason = EngineDied(f"the engine died: {error!r}")
    reason.__cause__ = error
    return reason

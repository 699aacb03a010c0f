"""Data sets that are opened for submitted runs: once for each submission, however often its client asks.

An opening goes on when its client has given up waiting, because a thread cannot be ended and the client is about to ask
again; the next call gets its outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from paceline.errors import Busy

MAX_OPENINGS = 16
T = TypeVar("T")


class Openings:
    """Openings by submission: those under way, and those whose outcome no client has taken yet."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    async def open(self, submission: str, work: Callable[[], T]) -> T:
        """Return the result of `work` on a thread, or of the opening that an earlier call of this submission began.

        Raises the error of `work`, and Busy when too many openings are under way.
        """
        task = self._tasks.get(submission)
        if task is None:
            self._make_room()
            task = asyncio.create_task(asyncio.to_thread(work))
            self._tasks[submission] = task
        await asyncio.wait((task,))  # goes on if this caller gives up
        if self._tasks.get(submission) is task:
            del self._tasks[submission]
        result: T = task.result()
        return result

    def _make_room(self) -> None:
        """Delete the oldest outcome that no client took, if there are `MAX_OPENINGS`. Raises Busy."""
        if len(self._tasks) < MAX_OPENINGS:
            return
        done = next((name for name, task in self._tasks.items() if task.done()), None)
        if done is None:
            raise Busy(f"the data sets of {len(self._tasks)} runs are being opened; submit again later")
        self._tasks.pop(done).exception()  # marks the exception as retrieved

"""Data sets that are opened for runs to come: one opening for each submission, however often its client asks.

An opening goes on when its client has given up waiting, because a thread cannot be ended and the client is about to ask
again; whoever asks next gets its outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from paceline.errors import Busy

MAX_OPENINGS = 16


class Openings:
    """Those under way, and those whose outcome nobody has taken yet, by submission."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    async def open(self, submission: str, work: Callable[[], object]) -> None:
        """Waits for `work` on a thread; for the one that was begun earlier for this submission, if there is one.

        Raises what `work` raised, and Busy when too many are under way.
        """
        task = self._tasks.get(submission)
        if task is None:
            self._make_room()
            task = asyncio.create_task(asyncio.to_thread(work))
            self._tasks[submission] = task
        await asyncio.wait((task,))  # a caller that gives up leaves it to go on
        if self._tasks.get(submission) is task:
            del self._tasks[submission]
        task.result()

    def _make_room(self) -> None:
        """Forgets the oldest outcome that nobody took, if all places are taken."""
        if len(self._tasks) < MAX_OPENINGS:
            return
        done = next((name for name, task in self._tasks.items() if task.done()), None)
        if done is None:
            raise Busy(f"the data sets of {len(self._tasks)} runs are being opened; submit again later")
        self._tasks.pop(done).exception()  # marks a fault as looked at

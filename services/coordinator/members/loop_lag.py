"""How long the event loop stood still: blocked by a disk, or its process stopped.

Whoever judges others by their silence takes this off, because nobody could be heard meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

BEAT_S = 0.1
IGNORED_S = 0.05
"""Lateness of a beat that is no pause."""


class LoopLag:
    """Sums the pauses of the running loop. `watch` keeps the beat; `take` also counts a pause that has just ended and whose beat
    is still to come."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._due_s = clock() + BEAT_S
        self._lag_s = 0.0

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(max(0.0, self._due_s - self._clock()))
            self.beat()

    def beat(self) -> None:
        """A beat that was due, or comes early and says nothing."""
        now_s = self._clock()
        late_s = now_s - self._due_s
        if late_s > IGNORED_S:
            self._lag_s += late_s
        if late_s >= 0:
            self._due_s = now_s + BEAT_S

    def take(self) -> float:
        """Seconds of pauses since the last call."""
        self.beat()
        lag_s, self._lag_s = self._lag_s, 0.0
        return lag_s

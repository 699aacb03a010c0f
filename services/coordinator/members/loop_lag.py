"""Pauses of the event loop: a disk blocked it, or its process was stopped.

Members' silence is counted without these pauses, because no member could be heard meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

BEAT_S = 0.1
IGNORED_S = 0.05
"""Lateness of a beat that does not count as a pause."""


class LoopLag:
    """Sum of the pauses of the running loop. `watch` keeps the beat; `take` also counts a pause that has just ended and
    whose beat is still to come."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._due_s = clock() + BEAT_S
        self._lag_s = 0.0

    async def watch(self) -> None:
        """Beat until cancelled."""
        while True:
            await asyncio.sleep(max(0.0, self._due_s - self._clock()))
            self.beat()

    def beat(self) -> None:
        """Note a beat that was due; an early beat changes nothing."""
        now_s = self._clock()
        late_s = now_s - self._due_s
        if late_s > IGNORED_S:
            self._lag_s += late_s
        if late_s >= 0:
            self._due_s = now_s + BEAT_S

    def take(self) -> float:
        """Return the seconds of pauses since the last call."""
        self.beat()
        lag_s, self._lag_s = self._lag_s, 0.0
        return lag_s

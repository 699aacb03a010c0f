"""Taken share of a worker's room, for its heartbeats: the mean over the time since the heartbeat before.

The mean, because work that takes milliseconds would be missed, or count for a second, if the room was looked at once a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Occupancy:
    """Share of the room that is taken; a worker begins with nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._share = 0.0
        self._since_s = self._taken_s = clock()
        self._sum_s = 0.0
        """Seconds by their share, from `_taken_s` to `_since_s`."""

    def note(self, work: float, room: float) -> None:
        """Note the work in hand and the room for it, in any unit."""
        self._pass_time()
        self._share = min(1.0, work / max(room, 1))

    def take(self) -> float:
        """Return the mean share since the last call."""
        self._pass_time()
        seconds = self._since_s - self._taken_s
        mean = self._sum_s / seconds if seconds > 0 else self._share
        self._taken_s, self._sum_s = self._since_s, 0.0
        return mean

    def _pass_time(self) -> None:
        now_s = self._clock()
        self._sum_s += (now_s - self._since_s) * self._share
        self._since_s = now_s

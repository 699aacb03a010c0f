"""Reports a worker's progress: a log line at most once a period, and with each heartbeat the mean share of its capacity
in use. A measurement once a second would miss work that takes milliseconds, or count such work for a whole second."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

PERIOD_S = 10.0


class ProgressLog:
    """Adds up amounts, and writes a log line with the sums once a period."""

    def __init__(self, log: logging.Logger, *, period_s: float = PERIOD_S, clock: Callable[[], float] = time.monotonic):
        self._log, self._period_s, self._clock = log, period_s, clock
        self._since_s = clock()
        self._sums: dict[str, float] = {}

    def note(self, line: Callable[[dict[str, float], float], str], **amounts: float) -> None:
        """Add the amounts. If the period is over, write `line` with the sums and the seconds since the last line."""
        for name, amount in amounts.items():
            self._sums[name] = self._sums.get(name, 0.0) + amount
        elapsed_s = self._clock() - self._since_s
        if elapsed_s >= self._period_s:
            self._log.info("%s", line(self._sums, elapsed_s))
            self._since_s, self._sums = self._clock(), {}


class Occupancy:
    """Mean share of a worker's capacity in use, over time; the share begins with 0."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._share = 0.0
        self._since_s = self._taken_s = clock()
        self._sum_s = 0.0
        """Integral of the share over time, in seconds, from `_taken_s` to `_since_s`."""

    def note(self, work: float, room: float) -> None:
        """Note the amount of work and the capacity for it, in any unit."""
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

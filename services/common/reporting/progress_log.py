"""Lines in a worker's log that tell what it has done, at most one in a period, so that a service that runs by itself shows
that it works."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

PERIOD_S = 10.0


class ProgressLog:
    """Adds up amounts, and writes a line with their sums when a period has passed."""

    def __init__(
        self, log: logging.Logger, *, period_s: float = PERIOD_S, clock: Callable[[], float] = time.monotonic
    ):
        self._log, self._period_s, self._clock = log, period_s, clock
        self._since_s = clock()
        self._sums: dict[str, float] = {}

    def note(self, line: Callable[[dict[str, float], float], str], **amounts: float) -> None:
        """Add the amounts; if the period has passed, write `line` of all sums since the last line and of its seconds."""
        for name, amount in amounts.items():
            self._sums[name] = self._sums.get(name, 0.0) + amount
        elapsed_s = self._clock() - self._since_s
        if elapsed_s >= self._period_s:
            self._log.info("%s", line(self._sums, elapsed_s))
            self._since_s, self._sums = self._clock(), {}

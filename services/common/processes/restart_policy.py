"""The rule for restarts of a service that died, and for the log lines about it. Pure, fed with deaths.

A death by a signal from outside, or after a life that was long enough for some work, is not likely to repeat: the
service is restarted at once. A service that keeps failing is restarted ever more slowly, and logged ever more rarely.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from paceline.calls.backoff import pause_after

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 60.0
MAX_BACKOFF_AFTER_SIGNAL_S = 10.0
HEALTHY_S = 30.0
"""A longer life counts as progress, because the pool has started up and worked by then."""

LOGGED_EACH = 4
"""Deaths in a row that are logged one by one; later only the fifth, the tenth, the twentieth and so on."""

FROM_OUTSIDE = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE}
)
"""Signals that do not come from the program itself: a person, or the kernel for lack of memory, killed it."""

CHANGING = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True)
class Death:
    """The end of one life."""

    status: int
    """Return code; negative is the signal, as in `subprocess`."""
    life_s: float
    reason: str = ""
    """Line of its log that says why it died."""
    by_supervisor: bool = False
    """True when the supervisor itself killed it and knows why."""

    @property
    def way(self) -> tuple[int, str]:
        """Return status and reason without the numbers that differ each time: equal for two deaths of one cause."""
        return self.status, CHANGING.sub("#", self.reason)


class RestartPolicy:
    """The rule for one service, with its deaths so far."""

    def __init__(self, max_backoff_s: float = MAX_BACKOFF_S):
        self._max_backoff_s = max_backoff_s
        self._way: tuple[int, str] | None = None
        self.in_a_row = 0
        """Deaths since it last worked; deaths that the supervisor caused do not count."""
        self.same_way = 0
        """Deaths of one cause in a row, however long the lives between them were."""
        self.pause_s = FIRST_BACKOFF_S
        """Seconds until the next life."""

    def count(self, death: Death) -> None:
        """Count a death."""
        if death.by_supervisor:
            self.pause_s = FIRST_BACKOFF_S
            return
        from_outside = -death.status in FROM_OUTSIDE
        self.same_way = self.same_way + 1 if death.way == self._way else 1
        self._way = death.way
        well = death.life_s >= HEALTHY_S and (from_outside or self.same_way == 1)
        self.in_a_row = 1 if well else self.in_a_row + 1
        longest_s = (
            min(MAX_BACKOFF_AFTER_SIGNAL_S, self._max_backoff_s) if from_outside else self._max_backoff_s
        )
        self.pause_s = pause_after(self.in_a_row, FIRST_BACKOFF_S, longest_s)

    @property
    def is_logged(self) -> bool:
        """Return whether this death is logged."""
        times = max(self.in_a_row, self.same_way)
        return times <= LOGGED_EACH or (times % 5 == 0 and (times // 5) & (times // 5 - 1) == 0)

    def in_words(self, name: str, how: str) -> str:
        """Return the death as a clause with its repetitions, such as "ended with exit status 1"."""
        if self.same_way > LOGGED_EACH:
            return f"{name} has died {self.same_way} times the same way: it {how}"
        if self.in_a_row > LOGGED_EACH:
            return f"{name} has died {self.in_a_row} times in a row; the last time it {how}"
        return f"{name} {how}"

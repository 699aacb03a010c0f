"""When a service that died is started again, and what is said about it: a pure rule, fed with deaths.

A death by a signal from outside, or after a life that was long enough for some work, is nothing that the service would do
again: it comes back at once. A service that keeps failing comes back ever more slowly, and is spoken of ever more rarely.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from paceline.backoff import pause_after

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 60.0
MAX_BACKOFF_AFTER_SIGNAL_S = 10.0
HEALTHY_S = 30.0
"""A life that lasted longer counts as progress: the pool has started up and worked by then."""

SAID_EACH = 4
"""Deaths in a row that are said one by one; later only the fifth, the tenth, the twentieth and so on."""

FROM_OUTSIDE = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE}
)
"""Signals that a program does not get by a fault of its own: somebody, or the kernel for lack of memory, killed it."""

CHANGING = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True)
class Death:
    """How one life ended."""

    status: int
    """Return code; negative is the signal, as in `subprocess`."""
    life_s: float
    last_line: str = ""
    """Of its log."""
    by_supervisor: bool = False
    """The supervisor itself killed it and knows why."""

    @property
    def way(self) -> tuple[int, str]:
        """Equal for two deaths of one cause: status and last line, without the numbers that differ each time."""
        return self.status, CHANGING.sub("#", self.last_line)


class RestartPolicy:
    """What the deaths of one service so far mean for its next life."""

    def __init__(self, max_backoff_s: float = MAX_BACKOFF_S):
        self._max_backoff_s = max_backoff_s
        self._way: tuple[int, str] | None = None
        self.in_a_row = 0
        """Deaths since it was last well; those that the supervisor caused are none."""
        self.same_way = 0
        """Deaths of one cause in a row, however long the lives between them were."""
        self.pause_s = FIRST_BACKOFF_S
        """Seconds until the next life."""

    def count(self, death: Death) -> None:
        """Takes a death in."""
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
    def is_said(self) -> bool:
        """Whether this death deserves a line."""
        times = max(self.in_a_row, self.same_way)
        return times <= SAID_EACH or (times % 5 == 0 and (times // 5) & (times // 5 - 1) == 0)

    def in_words(self, name: str, how: str) -> str:
        """The death in a clause, with its repetitions: how it is `name`'s end, such as "ended with exit status 1"."""
        if self.same_way > SAID_EACH:
            return f"{name} has died {self.same_way} times the same way: it {how}"
        if self.in_a_row > SAID_EACH:
            return f"{name} has died {self.in_a_row} times in a row; the last time it {how}"
        return f"{name} {how}"

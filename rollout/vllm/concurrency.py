"""The number of sequences that an engine should have: a state machine fed with the scheduler's report of each step.

An engine with a paged KV cache holds as many sequences as fit with their tokens, a number that is not known beforehand:
few if all of them get long, many if most end early. Too few leave it idle; too many are preempted, and the work on a
preempted sequence is repeated. So the limit starts at the number that fits even with the longest sequences, and then

- *grows* by an eighth when it limits the engine: all sequences run and the cache has room;
- is *trimmed* to the running sequences when the cache is nearly full: those that end are not replaced;
- is *cut* by a fifth when a sequence was preempted, and does not grow for a while.
"""

from __future__ import annotations

from dataclasses import dataclass

GROW_BELOW = 0.80
"""KV-cache use (fraction of blocks) under which the limit may grow."""
TRIM_ABOVE = 0.95
"""KV-cache use (fraction of blocks) above which the limit is trimmed."""
GROW_EVERY = 32
"""Number of steps between two growths, because new sequences need time to fill their blocks."""
REST_AFTER_CUT = 512
"""Number of steps without growth after a cut."""


@dataclass(frozen=True)
class StepReport:
    """An engine's state after one step."""

    running: int
    waiting: int
    kv_use: float
    """Fraction of the KV cache's blocks in use."""
    preempted: int
    """Number of sequences that were preempted in this step."""


class ConcurrencyLimit:
    """State machine whose `limit`, from 1 to `most`, is the number of sequences to have, running and waiting."""

    def __init__(self, *, sure: int, most: int) -> None:
        """Start at `sure` sequences, which fit at any length. The engine runs at most `most` sequences at a time."""
        self._most = most
        self.limit = max(1, min(sure, most))
        self._rest = GROW_EVERY
        self._excused = 0

    def step(self, report: StepReport) -> int:
        """Update the limit after one step, and return it."""
        excused = min(report.preempted, self._excused)
        self._excused -= excused
        self._rest = max(0, self._rest - 1)
        if report.preempted > excused:
            in_hand = report.running + report.waiting
            self._set(min(self.limit, in_hand) * 4 // 5)
            self._rest = REST_AFTER_CUT
        elif report.kv_use > TRIM_ABOVE:
            self._set(min(self.limit, report.running))
        elif report.kv_use < GROW_BELOW and report.waiting == 0 and report.running >= self.limit and self._rest == 0:
            self._set(self.limit + max(1, self.limit // 8))
            self._rest = GROW_EVERY
        return self.limit

    def ignore_preemptions(self, running: int) -> None:
        """Ignore the next `running` preemptions, by which the engine computes caches again after new weights."""
        self._excused = running

    def _set(self, limit: int) -> None:
        self.limit = max(1, min(limit, self._most))

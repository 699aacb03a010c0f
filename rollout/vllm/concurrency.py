"""How many sequences an engine wants in hand: a state machine fed with what its scheduler reports after each step.

An engine with a paged KV cache has room for as many sequences as their tokens fit, which nobody knows beforehand: few
if all of them get long, many if most end early. Too few in hand leave it idle; too many are preempted, and what a
preempted sequence had computed is computed again. So the limit starts where even the longest sequences fit, and then

- *grows* by an eighth when it is what holds the engine back: everything in hand runs and the cache has room;
- is *trimmed* to what runs when the cache is nearly full: those that end are not replaced;
- is *cut* by a fifth when a sequence was preempted, and does not grow for a while.
"""

from __future__ import annotations

from dataclasses import dataclass

GROW_BELOW = 0.80
"""KV-cache use (fraction of blocks) under which the limit may grow."""
TRIM_ABOVE = 0.95
"""KV-cache use above which it is trimmed."""
GROW_EVERY = 32
"""Steps between two growths: new sequences need time to show what they take."""
REST_AFTER_CUT = 512
"""Steps without growth after a cut."""


@dataclass(frozen=True)
class StepReport:
    """An engine's state after one step."""

    running: int
    waiting: int
    kv_use: float
    """Fraction of the KV cache's blocks that are in use."""
    preempted: int
    """Sequences that lost their place in this step."""


class ConcurrencyLimit:
    """`limit` is how many sequences should be in hand, running and waiting; from `least` to `most`."""

    def __init__(self, *, sure: int, most: int, least: int = 1) -> None:
        """`sure` sequences fit however long they get; the engine runs at most `most` at a time."""
        self._most = most
        self._least = min(least, most)
        self.limit = max(self._least, min(sure, most))
        self._rest = GROW_EVERY
        self._excused = 0

    def step(self, report: StepReport) -> int:
        """Take note of one step; returns the limit."""
        excused = min(report.preempted, self._excused)
        self._excused -= excused
        self._rest = max(0, self._rest - 1)
        if report.preempted > excused:
            in_hand = report.running + report.waiting
            self._set(min(self.limit, in_hand) * 4 // 5)
            self._rest = REST_AFTER_CUT
        elif report.kv_use > TRIM_ABOVE:
            self._set(min(self.limit, report.running))
        elif (
            report.kv_use < GROW_BELOW
            and report.waiting == 0
            and report.running >= self.limit
            and self._rest == 0
        ):
            self._set(self.limit + max(1, self.limit // 8))
            self._rest = GROW_EVERY
        return self.limit

    def excuse(self, running: int) -> None:
        """New weights make the engine compute the cache of its `running` sequences anew, which it reports as preemptions."""
        self._excused = running

    def _set(self, limit: int) -> None:
        self.limit = max(self._least, min(limit, self._most))

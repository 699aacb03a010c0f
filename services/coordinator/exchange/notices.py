"""Events of the exchange's transactions, for others to handle after the commit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.services.coordinator.ledger.segments import UnopenedSegment

UNOPENED_PERIOD_S = 60.0
"""Seconds between two warnings about segments that cannot be opened."""


@dataclass(frozen=True)
class Notice:
    """An event of a transaction, to be handled after its commit."""

    kind: str
    """The kind of event: `step` (a step was trained), `paused` (until a person resumes the run), `evaluated`, `pinned`
    (a worker keeps its version), `unpinned`, `metrics` (of a learner's step), `extra` (columns that reward functions
    logged), `warning`."""
    content: dict[str, Any]
    run_id: str = ""
    """Id of the event's run; another run may be active by the time the event is handled."""


class Notices:
    """Events that nobody has taken yet; `run_id` returns the id of the active run, or an empty text."""

    def __init__(self, run_id: Callable[[], str]):
        self._run_id = run_id
        self._waiting: list[Notice] = []
        self._unopened_warned_s = -math.inf

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, kind: str, **content: Any) -> None:
        self._waiting.append(Notice(kind, content, self._run_id()))

    def warn(self, message: str) -> None:
        self.add("warning", message=message)

    def warn_of_unopened(self, fault: UnopenedSegment) -> None:
        """Warn that a group cannot be read or stored until a segment can be opened; this is tried again later."""
        now_s = time.monotonic()
        if now_s - self._unopened_warned_s < UNOPENED_PERIOD_S:
            return
        self._unopened_warned_s = now_s
        self.warn(
            f"{fault}. Groups wait for this segment, and opening it is retried automatically; check its permissions and "
            "the limit of open files"
        )

    def undo(self, number: int) -> None:
        """Remove all but the first `number` events, because the part of the transaction that added them is rolled
        back."""
        del self._waiting[number:]

    def take(self) -> list[Notice]:
        waiting, self._waiting = self._waiting, []
        return waiting

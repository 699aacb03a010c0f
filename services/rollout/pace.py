"""Pace of a rollout worker for its heartbeats: tokens per second, and the share of time without a lease."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """Pace since the last heartbeat. A worker begins without a lease."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._empty_since_s: float | None = clock()
        self._empty_s = 0.0
        """Seconds without a lease in all, up to `_empty_since_s`."""
        self._reported = (clock(), 0, 0.0)
        """Time, tokens and seconds without a lease at the last heartbeat."""

    def begin_work(self) -> None:
        """Note that the worker has a lease."""
        if self._empty_since_s is not None:
            self._empty_s += self._clock() - self._empty_since_s
            self._empty_since_s = None

    def end_work(self) -> None:
        """Note that the worker has no lease any more."""
        self._empty_since_s = self._clock()

    def gauges(self, generated_tokens: int) -> dict[str, float]:
        """Return the gauges since the last call; `generated_tokens` are those of the worker's life."""
        now_s, empty_s = self._clock(), self._empty_s
        if self._empty_since_s is not None:
            empty_s += now_s - self._empty_since_s
        since_s, tokens, earlier_empty_s = self._reported
        self._reported = (now_s, generated_tokens, empty_s)
        elapsed_s = max(now_s - since_s, 1e-6)
        return {
            "tokens_per_s": (generated_tokens - tokens) / elapsed_s,
            "wait_fraction": min(1.0, (empty_s - earlier_empty_s) / elapsed_s),
        }

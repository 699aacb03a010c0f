"""Pace of an environment worker for its heartbeats: turns and tokens per second."""

from __future__ import annotations

import time
from collections.abc import Callable


class TurnPace:
    """Turns that were sampled since the last heartbeat."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._turns = self._tokens = 0
        self._since_s = clock()

    def note(self, num_tokens: int) -> None:
        """Count a sampled turn."""
        self._turns += 1
        self._tokens += num_tokens

    def gauges(self) -> dict[str, float]:
        """Return the gauges since the last call."""
        now_s = self._clock()
        elapsed_s = max(now_s - self._since_s, 1e-6)
        turns, tokens = self._turns, self._tokens
        self._turns, self._tokens, self._since_s = 0, 0, now_s
        return {"turns_per_s": turns / elapsed_s, "tokens_per_s": tokens / elapsed_s}

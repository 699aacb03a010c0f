"""The pauses between tries of something that may work later."""

from __future__ import annotations

FIRST_S, LONGEST_S = 5.0, 60.0


class ExponentialBackoff:
    """`first_s`, then twice as long each time, up to `longest_s`."""

    def __init__(self, first_s: float = FIRST_S, longest_s: float = LONGEST_S):
        self._first_s, self._longest_s = first_s, longest_s
        self._next_s = first_s

    def next_s(self) -> float:
        """Seconds until the next try; the pause after it is longer."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return pause_s

    def reset(self) -> None:
        """It worked: the next pause is the first again."""
        self._next_s = self._first_s

"""The pauses between tries of something that may work later."""

from __future__ import annotations

FIRST_S, LONGEST_S = 5.0, 60.0
MAX_DOUBLINGS = 30


def pause_after(failures: int, first_s: float, longest_s: float) -> float:
    """Return the seconds to wait after so many failures in a row: `first_s` after one, then doubled up to `longest_s`."""
    return min(first_s * 2.0 ** min(failures - 1, MAX_DOUBLINGS), longest_s)


class ExponentialBackoff:
    """Counts the failures: `first_s`, then twice as long each time, up to `longest_s`."""

    def __init__(self, first_s: float = FIRST_S, longest_s: float = LONGEST_S):
        self._first_s, self._longest_s = first_s, longest_s
        self._failures = 0

    def next_s(self) -> float:
        """Return the seconds until the next try; the pause after it is longer."""
        self._failures += 1
        return pause_after(self._failures, self._first_s, self._longest_s)

    def reset(self) -> None:
        """Begin with the first pause again, because a try succeeded."""
        self._failures = 0

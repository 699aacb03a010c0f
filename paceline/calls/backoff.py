"""The pauses between tries of something that may work later, and the hint in a refusal for want of room: the seconds after which the
same call may be taken. Over gRPC that is trailing metadata of RESOURCE_EXHAUSTED, under the name that gRPC's own retry policies read;
over HTTP the header Retry-After.
"""

from __future__ import annotations

import math
from typing import Any

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


KEY = "grpc-retry-pushback-ms"
"""Milliseconds, as in gRPC's proposal A6."""
MAX_S = 3600.0


def to_metadata(seconds: float) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata of a refusal."""
    return ((KEY, str(math.ceil(1000 * min(seconds, MAX_S)))),)


def to_header(seconds: float) -> dict[str, str]:
    """Return the header of a refusal, in whole seconds."""
    return {"Retry-After": str(max(1, math.ceil(min(seconds, MAX_S))))}


def from_error(error: Any) -> float | None:
    """Return the hint of a gRPC error in seconds, MAX_S at most; None without one."""
    trailing = getattr(error, "trailing_metadata", lambda: None)() or ()
    value = str(dict(trailing).get(KEY, ""))
    return min(int(value) / 1000, MAX_S) if value.isascii() and value.isdigit() and len(value) < 10 else None

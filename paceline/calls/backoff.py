"""Exponential back-off between retries, and the retry hint of a server without room: the seconds after which the same
call may succeed. Over gRPC the hint is trailing metadata of RESOURCE_EXHAUSTED, under the name that gRPC's retry
policies read; over HTTP it is the header Retry-After."""

from __future__ import annotations

import math
from typing import Any

FIRST_S, LONGEST_S = 5.0, 60.0
MAX_DOUBLINGS = 30


def pause_after(failures: int, first_s: float, longest_s: float) -> float:
    """Return the pause in seconds after failures in a row: `first_s`, then doubled each time, at most `longest_s`."""
    return min(first_s * 2.0 ** min(failures - 1, MAX_DOUBLINGS), longest_s)


class ExponentialBackoff:
    """Counts failures. The pause is `first_s` at first, and doubles with each further failure, up to `longest_s`."""

    def __init__(self, first_s: float = FIRST_S, longest_s: float = LONGEST_S):
        self._first_s, self._longest_s = first_s, longest_s
        self._failures = 0

    def next_s(self) -> float:
        """Count a failure and return the seconds until the next retry."""
        self._failures += 1
        return pause_after(self._failures, self._first_s, self._longest_s)

    def reset(self) -> None:
        self._failures = 0


KEY = "grpc-retry-pushback-ms"
"""Key of the hint in the metadata of a refusal, in milliseconds as in gRPC's proposal A6."""
MAX_S = 3600.0


def to_metadata(seconds: float) -> tuple[tuple[str, str], ...]:
    """Return a refusal's trailing metadata, which says when to retry."""
    return ((KEY, str(math.ceil(1000 * min(seconds, MAX_S)))),)


def to_header(seconds: float) -> dict[str, str]:
    """Return a refusal's header Retry-After, in whole seconds."""
    return {"Retry-After": str(max(1, math.ceil(min(seconds, MAX_S))))}


def from_error(error: Any) -> float | None:
    """Return the retry hint of a gRPC error in seconds, at most MAX_S; None if the error has no hint."""
    trailing = getattr(error, "trailing_metadata", lambda: None)() or ()
    value = str(dict(trailing).get(KEY, ""))
    return min(int(value) / 1000, MAX_S) if value.isascii() and value.isdigit() and len(value) < 10 else None

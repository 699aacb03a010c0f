"""The hint in a refusal for want of room: the seconds after which the same call may be taken.

Over gRPC it is trailing metadata of RESOURCE_EXHAUSTED, under the name that gRPC's own retry policies read; over HTTP the
header Retry-After.
"""

from __future__ import annotations

import math
from typing import Any

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

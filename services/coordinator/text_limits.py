"""Limits on texts, names and numbers from members that enter events, metrics and logs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

MAX_TEXT_BYTES = 4096
"""Largest number of bytes of a reason, a warning or an error."""

MAX_LINE_BYTES = 1000
"""Largest number of bytes of a text in a line of the log; the run's events have the whole text."""

MAX_GAUGES = 100
"""Largest number of gauges in one heartbeat."""

MAX_METRICS = 500
"""Largest number of metrics in one receipt."""

MAX_NAME = 64
"""Largest number of characters of a gauge's or metric's name."""

MAX_EVENT_BYTES = 256 << 10
"""Largest number of bytes of one event, so that a page of events fits into a message to a watcher."""


def cut(text: str, limit: int = MAX_TEXT_BYTES) -> str:
    """Cut a text to `limit` bytes of UTF-8, with a note on what is missing."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return text
    missing = f"… ({len(data)} bytes)"
    return data[: limit - len(missing.encode())].decode("utf-8", "ignore") + missing


def one_line(text: str, limit: int = MAX_LINE_BYTES) -> str:
    return cut("".join(c if c.isprintable() else " " for c in text[: limit + 1]), limit)


def finite_gauges(values: Mapping[str, float]) -> dict[str, float]:
    """Return the finite gauges whose names have at most MAX_NAME characters; at most MAX_GAUGES of them."""
    named = bounded_metrics(values, MAX_GAUGES)
    return {name: value for name, value in named.items() if math.isfinite(value)}


def bounded_metrics(values: Mapping[str, float], limit: int = MAX_METRICS) -> dict[str, float]:
    """Return at most `limit` metrics whose names have at most MAX_NAME characters. Losses may be infinite or NaN."""
    kept: dict[str, float] = {}
    for name, value in values.items():
        if len(kept) == limit:
            break
        if len(name) <= MAX_NAME and name.isprintable():
            kept[name] = value
    return kept


def seconds(value: float) -> float:
    """Return a duration that a member reports; 0 if it is invalid."""
    return value if math.isfinite(value) and value >= 0 else 0.0


def event_json(content: Mapping[str, Any]) -> str:
    """Return an event as JSON; if it is too large for a watcher, its texts are cut."""
    text = json.dumps(content)
    if len(text) <= MAX_EVENT_BYTES:
        return text
    short = {
        cut(name, MAX_NAME): cut(value, MAX_TEXT_BYTES) if isinstance(value, str) else value
        for name, value in list(content.items())[:MAX_METRICS]
    }
    text = json.dumps(short)
    if len(text) <= MAX_EVENT_BYTES:
        return text
    plain = {name: value for name, value in short.items() if isinstance(value, int | float | bool)}
    return json.dumps(plain | {"left_out": sorted(short.keys() - plain.keys())})

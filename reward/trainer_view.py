"""Gives a reward function TRL's `trainer_state`, `log_metric` and `log_extra`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

MAX_METRICS = 32
"""Largest number of metrics of one call. Further metrics are dropped."""
MAX_NAME = 48
MAX_COLUMNS = 16
"""Largest number of columns that `log_extra` adds to one group. Further columns are dropped."""
MAX_VALUES = 4096
"""Largest number of values in a column that `log_extra` adds. A group has fewer completions."""
MAX_TEXT = 2000
"""Largest number of characters of a text that `log_extra` stores. A longer text is cut."""

USAGE = (
    "requests", "failed", "cached", "no_verdict", "prompt_tokens", "completion_tokens", "cost"
)  # fmt: skip
"""Names of the sums that a call may report of its requests to a service."""

POOL_WORKERS = "reward_workers"
"""Key of the training state with the number of the pool's workers. Functions do not get it."""

NO_STATE: Mapping[str, float] = {"global_step": 0, "max_steps": 0, "epoch": 0.0}
"""Training state of a call outside a run."""


class CallView:
    """One call of a reward function: the training state, and what the call logs. Built-in functions get the whole view."""

    def __init__(
        self, state: Mapping[str, Any] | None = None, label: str = "", timeout_s: float = 30.0, num_processes: int = 1
    ) -> None:
        self.label, self.timeout_s = label, timeout_s
        workers = (state or {}).get(POOL_WORKERS, 1)
        self.num_processes = num_processes * (workers if isinstance(workers, int) and workers > 0 else 1)
        """Number of processes of the reward pool, which share the limits of a service."""
        self.usage: dict[str, float] = {}
        """Maps a name in USAGE to its sum over the call's requests."""
        shown = {name: value for name, value in (state or {}).items() if name != POOL_WORKERS}
        self._state = SimpleNamespace(**{**NO_STATE, **shown})
        self.metrics: dict[str, tuple[float, int]] = {}
        """Maps a metric to the sum and the number of its logged values."""
        self.extra: dict[str, list[Any]] = {}
        """Maps an additional column to its [C] JSON values."""

    def arguments(self) -> dict[str, Any]:
        return {"trainer_state": self._state, "log_metric": self.log_metric, "log_extra": self.log_extra}

    def log_metric(self, name: str, value: float) -> None:
        """Add `value` to the metric's mean; ignore it if it is not finite."""
        number = float(value)
        known = name in self.metrics or len(self.metrics) < MAX_METRICS
        if math.isfinite(number) and known and is_metric_name(name):
            total, count = self.metrics.get(name, (0.0, 0))
            self.metrics[name] = (total + number, count + 1)

    def log_extra(self, column: str, values: Any) -> None:
        """Store a value for each completion beside its reward; another call with the same name replaces the values."""
        if is_metric_name(column) and (column in self.extra or len(self.extra) < MAX_COLUMNS):
            self.extra[column] = [_plain(value) for value in list(values)[:MAX_VALUES]]

    def count(self, name: str, value: float) -> None:
        self.usage[name] = self.usage.get(name, 0.0) + value


def checked_usage(value: Any) -> dict[str, float]:
    """Return the allowed sums of a reply, which is checked because its process runs user code."""
    found = value if isinstance(value, dict) else {}
    numbers = {name: found[name] for name in USAGE if isinstance(found.get(name), int | float)}
    return {name: float(number) for name, number in numbers.items() if math.isfinite(number) and number >= 0}


def is_metric_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable()


def checked_extra(value: Any, num_completions: int) -> dict[str, list[Any]]:
    """Return the columns of a reply with one value for each completion; checked, because its process runs user code."""
    columns: dict[str, list[Any]] = {}
    for name, values in list(value.items())[:MAX_COLUMNS] if isinstance(value, dict) else ():
        if is_metric_name(name) and isinstance(values, list) and len(values) == num_completions:
            columns[name] = [_plain(each) for each in values]
    return columns


def _plain(value: Any) -> Any:
    item = getattr(value, "item", None)  # unpacks scalars of NumPy and torch without importing either
    if item is not None and getattr(value, "size", None) in (1, None):
        value = item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < 1 << 53:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    return str(value)[:MAX_TEXT]


def checked_metrics(value: Any) -> dict[str, tuple[float, int]]:
    """Return the valid metrics of a reply; checked, because its process runs user code."""
    metrics: dict[str, tuple[float, int]] = {}
    for name, pair in list(value.items())[:MAX_METRICS] if isinstance(value, dict) else ():
        is_pair = isinstance(pair, list) and len(pair) == 2
        if is_metric_name(name) and is_pair and all(isinstance(part, int | float) for part in pair):
            total, count = pair
            if math.isfinite(total) and math.isfinite(count) and count >= 1:
                metrics[name] = (float(total), int(count))
    return metrics

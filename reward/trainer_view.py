"""A reward function's view of the training, and its calls to log: TRL's `trainer_state`, `log_metric`, `log_extra`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

MAX_METRICS = 32
"""Metrics of one call; further ones are left out."""
MAX_NAME = 48

NO_STATE: Mapping[str, float] = {"global_step": 0, "max_steps": 0, "epoch": 0.0}
"""State of a call without a run."""


class TrainerView:
    """The training as one call of a reward function sees it."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self._state = SimpleNamespace(**{**NO_STATE, **(state or {})})
        self.metrics: dict[str, tuple[float, int]] = {}
        """Sum and number of the logged values by name."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that a function may name."""
        return {
            "trainer_state": self._state,
            "log_metric": self._log_metric,
            "log_extra": self._log_extra,
        }

    def _log_metric(self, name: str, value: float) -> None:
        """Add `value` to the metric's mean. A value that is not finite is left out."""
        number = float(value)
        known = name in self.metrics or len(self.metrics) < MAX_METRICS
        if math.isfinite(number) and known and is_metric_name(name):
            total, count = self.metrics.get(name, (0.0, 0))
            self.metrics[name] = (total + number, count + 1)

    def _log_extra(self, column: str, values: Any) -> None:
        """Do nothing: the scores of a group have no place for further columns. The arguments are those of TRL."""


def is_metric_name(name: object) -> bool:
    """Return whether a metric may have this name."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable()


def checked_metrics(value: Any) -> dict[str, tuple[float, int]]:
    """Return the metrics of a reply, without those that no call makes: the reply comes from a process that runs user
    code."""
    metrics: dict[str, tuple[float, int]] = {}
    for name, pair in list(value.items())[:MAX_METRICS] if isinstance(value, dict) else ():
        is_pair = isinstance(pair, list) and len(pair) == 2
        if is_metric_name(name) and is_pair and all(isinstance(part, int | float) for part in pair):
            total, count = pair
            if math.isfinite(total) and math.isfinite(count) and count >= 1:
                metrics[name] = (float(total), int(count))
    return metrics

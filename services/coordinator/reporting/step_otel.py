"""Metrics of trained steps and evaluations as OpenTelemetry gauges, for a collector: the numbers of metrics.jsonl.

A gauge is named `paceline.train.<metric>` or `paceline.eval.<metric>` and has the value of the newest step; it carries the
attribute `paceline.run`. `paceline.train.step` and `paceline.eval.step` say which step that is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from opentelemetry import metrics
from opentelemetry.metrics import Meter

MAX_GAUGES = 512
"""Gauges of one process: the names of reward functions and of what they log are the user's."""
MAX_NAME = 200


class StepMeters:
    """Gauges of `meter`; by default of the process's provider, which does nothing where none is set up."""

    def __init__(self, meter: Meter | None = None) -> None:
        self._meter = meter or metrics.get_meter("paceline")
        self._gauges: dict[str, metrics._Gauge] = {}

    def record(self, run_id: str, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        """Record the finite numbers of a step (`train`) or an evaluation (`eval`)."""
        for name, value in {**numbers, "step": float(step)}.items():
            gauge = self._gauge(f"paceline.{kind}.{name}")
            if gauge is not None and math.isfinite(value):
                gauge.set(value, {"paceline.run": run_id})

    def _gauge(self, name: str) -> metrics._Gauge | None:
        """Return the gauge of a name, in the letters that OpenTelemetry takes; None beyond MAX_GAUGES."""
        name = re.sub(r"[^A-Za-z0-9_./-]", "_", name)[:MAX_NAME]
        if name not in self._gauges and len(self._gauges) < MAX_GAUGES:
            self._gauges[name] = self._meter.create_gauge(name)
        return self._gauges.get(name)

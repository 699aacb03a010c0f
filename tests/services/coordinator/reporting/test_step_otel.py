"""The numbers of a step as a collector gets them, read with the SDK's in-memory reader."""

from __future__ import annotations

import math

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from paceline.services.coordinator.reporting.otel import StepMeters


def values(reader: InMemoryMetricReader) -> dict[str, float]:
    """Return the value of every gauge, by name."""
    data = reader.get_metrics_data()
    assert data is not None
    found = {}
    for metric in (m for resource in data.resource_metrics for scope in resource.scope_metrics for m in scope.metrics):
        (point,) = metric.data.data_points
        assert dict(point.attributes or {}) == {"paceline.run": "run-1"}
        found[metric.name] = point.value  # type: ignore[union-attr]
    return found


def test_the_newest_step_is_in_gauges() -> None:
    reader = InMemoryMetricReader()
    meters = StepMeters(MeterProvider([reader]).get_meter("test"))
    meters.record("run-1", "train", 3, {"reward": 0.25, "reward/exact match?": 0.5, "loss": math.nan})
    meters.record("run-1", "train", 4, {"reward": 0.5})
    meters.record("run-1", "eval", 4, {"reward": 0.75})
    assert values(reader) == {
        "paceline.train.reward": 0.5,
        "paceline.train.reward/exact_match_": 0.5,
        "paceline.train.step": 4.0,
        "paceline.eval.reward": 0.75,
        "paceline.eval.step": 4.0,
    }


def test_the_number_of_gauges_is_bounded() -> None:
    reader = InMemoryMetricReader()
    meters = StepMeters(MeterProvider([reader]).get_meter("test"), max_gauges=2)
    meters.record("run-1", "train", 0, {f"logged/{number}": 1.0 for number in range(9)})
    assert set(values(reader)) == {"paceline.train.logged/0", "paceline.train.logged/1"}

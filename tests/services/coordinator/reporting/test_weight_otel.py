"""The numbers of a version as a collector gets them, read with the SDK's in-memory reader."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from paceline.groups import Version
from paceline.services.coordinator.reporting.otel import SECONDS, WeightMeters
from paceline.services.coordinator.reporting.weight_metrics import VersionRecord


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture
def meters(reader: InMemoryMetricReader) -> WeightMeters:
    return WeightMeters(MeterProvider([reader]).get_meter("test"))


def record(step: int, **numbers: float) -> VersionRecord:
    return VersionRecord(Version(1, step), epoch=5, members=2, acknowledged={"a"}, numbers=numbers)


def points(reader: InMemoryMetricReader) -> dict[str, Any]:
    """Return the one data point of every metric, by name."""
    data = reader.get_metrics_data()
    assert data is not None
    found = {}
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                (found[metric.name.removeprefix("paceline.weights.")],) = metric.data.data_points
                assert metric.name.startswith("paceline.weights.")
    return found


def test_two_versions_are_two_values_in_each_histogram_and_the_newest_in_each_gauge(
    meters: WeightMeters, reader: InMemoryMetricReader
) -> None:
    seconds = {name: 0.25 * (1 + place) for place, name in enumerate(SECONDS)}
    meters.record("run", record(3, size_bytes=1000.0, failures=1.0, **seconds))
    meters.record("run", record(4, size_bytes=24.0, failures=2.0, **seconds))
    found = points(reader)
    for name, value in seconds.items():
        point = found[name.removesuffix("_s")]
        assert (point.count, point.sum) == (2, 2 * value)
    assert (found["size"].count, found["size"].sum) == (2, 1024.0)
    gauges = {name: found[name].value for name in ("version", "epoch", "members", "acknowledged")}
    assert gauges == {"version": 4.0, "epoch": 5.0, "members": 2.0, "acknowledged": 1.0}
    assert found["failures"].value == 3.0
    assert {frozenset(point.attributes.items()) for point in found.values()} == {frozenset({("paceline.run", "run")})}


def test_what_a_version_has_no_number_for_is_no_zero(meters: WeightMeters, reader: InMemoryMetricReader) -> None:
    meters.record("run", record(3, gather_s=0.5, wait_s=0.5))
    found = points(reader)
    assert found["gather"].count == 1
    assert "pause" not in found
    assert "size" not in found

"""Gauges over time, as readers get them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from paceline.errors import InvalidInput
from paceline.records import Records
from paceline.services.coordinator.records.files import get_gauge_history
from paceline.v1 import records_pb2 as pb

BEGIN = 1_700_000_000.0


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two files of readings, every five seconds: `a` works more and more, `b` comes later."""
    (tmp_path / "gauges").mkdir()
    for part in range(2):
        begin_s = BEGIN + 50 * part
        with (tmp_path / "gauges" / f"gauges-{int(begin_s * 1e9):020d}.jsonl").open("w") as file:
            for number in range(10):
                members = {"a": {"pool": "rollout", "working": (10 * part + number) / 20}}
                if part:
                    members["b"] = {"pool": "rollout", "working": 1.0}
                file.write(json.dumps({"time": begin_s + 5 * number, "members": members}) + "\n")
            file.write('{"time": 17')  # by a kill
    return tmp_path


def columns(directory: Path, **request: object) -> dict[str, list[float | None]]:
    def call(method: str, message: pb.GetGaugeHistoryRequest) -> pb.GetGaugeHistoryResponse:
        return get_gauge_history(directory, message)

    return Records(call).gauge_history(**request)  # type: ignore[arg-type]


def test_pools_are_means_over_their_members(directory: Path) -> None:
    found = columns(directory)
    assert found["time"] == [BEGIN + 5 * number for number in range(20)]
    expected = [number / 20 for number in range(10)] + [(number / 20 + 1) / 2 for number in range(10, 20)]
    assert found["rollout/working"] == pytest.approx(expected)


def test_points_are_means_over_their_time(directory: Path) -> None:
    found = columns(directory, max_points=2, members=["a", "b", "nosuch"])
    assert found["time"] == [BEGIN, BEGIN + 50]
    assert found["a/working"] == pytest.approx([4.5 / 20, 14.5 / 20])
    assert found["b/working"] == [None, 1.0]


def test_a_range_has_its_readings_alone(directory: Path) -> None:
    found = columns(directory, from_time=BEGIN + 45, to_time=BEGIN + 55)
    assert found["time"] == [BEGIN + 45, BEGIN + 50, BEGIN + 55]


def test_nothing_is_on_record_at_first(tmp_path: Path) -> None:
    assert columns(tmp_path) == {"time": []}


@pytest.mark.parametrize(
    "request_",
    [pb.GetGaugeHistoryRequest(from_time=math.nan), pb.GetGaugeHistoryRequest(member_ids=["x"] * 65)],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, request_: pb.GetGaugeHistoryRequest) -> None:
    with pytest.raises(InvalidInput):
        get_gauge_history(tmp_path, request_)

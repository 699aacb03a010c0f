"""Texts, names, numbers and events from members are bounded before they are stored."""

from __future__ import annotations

import json
import math

from paceline.services.common.serving.grpc_server import details_of
from paceline.services.coordinator.text_limits import (
    MAX_EVENT_BYTES,
    MAX_GAUGES,
    bounded_metrics,
    cut,
    event_json,
    finite_gauges,
    one_line,
    seconds,
)


def test_a_text_is_cut_to_its_bytes_and_says_so() -> None:
    assert cut("short") == "short"
    assert len(cut("é" * 10_000).encode()) <= 4096
    assert cut("a" * 5000).endswith("… (5000 bytes)")


def test_a_text_in_a_log_cannot_end_its_line() -> None:
    assert one_line("gone\n2026-01-01 ERROR forged\x1b[0m") == "gone 2026-01-01 ERROR forged [0m"
    assert len(one_line("a" * 100_000)) <= 1000


def test_gauges_are_few_finite_and_named_in_short() -> None:
    said = {f"g{number}": 1.0 for number in range(200_000)}
    assert len(finite_gauges(said)) == MAX_GAUGES
    odd = {"nan": math.nan, "inf": math.inf, "n" * 65: 1.0, "a\nb": 1.0, "fine": 2.0}
    assert finite_gauges(odd) == {"fine": 2.0}
    assert set(bounded_metrics(odd)) == {"nan", "inf", "fine"}, "a loss may be anything"


def test_a_duration_is_none_when_it_cannot_be_one() -> None:
    assert [seconds(value) for value in (1.5, -1.0, math.nan, math.inf)] == [1.5, 0.0, 0.0, 0.0]


def test_an_event_always_fits_into_a_message() -> None:
    small = {"message": "x" * 10_000, "step": 3}
    assert json.loads(event_json(small)) == small
    large = {"message": "x" * (8 << 20), "step": 3}
    assert len(event_json(large)) < MAX_EVENT_BYTES
    assert json.loads(event_json(large))["step"] == 3
    nested = {"step": 3, "rows": ["y" * 100] * 100_000}
    assert json.loads(event_json(nested)) == {"step": 3, "left_out": ["rows"]}


def test_the_text_of_a_status_fits_into_a_trailer() -> None:
    assert details_of("plain\nwords") == "plain\nwords"
    for text in ("a" * 100_000, "é" * 100_000, "%\n" * 100_000):
        size = sum(1 if " " <= c <= "~" and c != "%" else 3 * len(c.encode()) for c in details_of(text))
        assert size <= 4096

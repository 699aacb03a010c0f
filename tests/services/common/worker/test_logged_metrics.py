"""Logged values from the reward workers to the mean of a step."""

from __future__ import annotations

import pytest

from paceline.services.common.worker.score_extras import LoggedMetrics


def test_the_mean_is_over_all_values_of_all_heartbeats_and_workers() -> None:
    received, worker = LoggedMetrics(), LoggedMetrics()
    worker.add({"length": (6.0, 3), "correct": (1.0, 2)})
    assert received.add_gauges({"groups_since_report": 2.0, **worker.take_gauges()}) == {"groups_since_report": 2.0}
    assert worker.take_gauges() == {}
    worker.add({"length": (4.0, 1)})
    received.add_gauges(worker.take_gauges())
    assert received.means() == {"logged/length": pytest.approx(2.5), "logged/correct": pytest.approx(0.5)}
    assert received.take()
    assert received.means() == {}


def test_names_are_bounded_and_a_sum_without_a_count_is_left_out() -> None:
    received = LoggedMetrics()
    received.add_gauges({"logged_sum/a": 1.0, "logged_sum/b": 1.0, "logged_count/b": 0.0})
    assert received.means() == {}
    received.add({f"n{i}": (1.0, 1) for i in range(100)})
    assert len(received.means()) == 32

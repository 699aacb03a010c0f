"""Calls of reward functions from the workers to the metrics of a step."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.reward.results import RewardFailure, RewardResult
from paceline.reward.trainer_view import USAGE
from paceline.services.common.worker.score_extras import ENDPOINT_METRICS, FunctionSums
from paceline.spec import RewardFunctionSection

FUNCTIONS = [RewardFunctionSection(function="a"), RewardFunctionSection(function="b", name="judge")]


def test_times_and_failures_are_of_all_workers_since_the_step_before() -> None:
    workers, received = (FunctionSums(), FunctionSums()), FunctionSums()
    scored = RewardResult(
        np.zeros((1, 2), np.float32), None, (0.5, 2.0), usage={"requests/judge": 3.0, "cost/judge": 0.25}
    )
    failed = RewardResult(None, RewardFailure("judge", "timeout", "timed out"), (0.1, 4.0))
    not_started = RewardResult(None, RewardFailure("a, judge", "died", "could not be started"), ())
    workers[0].add_result(FUNCTIONS, scored)
    workers[0].add_result(FUNCTIONS, not_started)
    workers[1].add_result(FUNCTIONS, failed)
    for worker in workers:
        assert received.add_gauges({"groups_since_report": 2.0, **worker.take_gauges()}) == {"groups_since_report": 2.0}
        assert worker.take_gauges() == {}
    assert received.metrics() == pytest.approx(
        {
            "score_s/a": 0.3,
            "failed_calls/a": 0.0,
            "score_s/judge": 3.0,
            "failed_calls/judge": 1.0,
            "endpoint_requests/judge": 3.0,
            "endpoint_cost/judge": 0.25,
        }
    )
    assert received.take()
    assert received.metrics() == {}


def test_sums_are_bounded() -> None:
    received = FunctionSums()
    received.add_gauges({f"fn/calls/f{i}": 1.0 for i in range(1000)})
    assert len(received.take()) == 256


def test_every_sum_of_a_service_has_a_metric() -> None:
    assert set(USAGE) == set(ENDPOINT_METRICS)

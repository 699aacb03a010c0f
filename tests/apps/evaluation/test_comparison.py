"""The comparison of two models in use: decisions, intervals over prompts, a candidate that passed its gate by luck."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.apps.evaluation.gate import Bounds, compare, judge
from paceline.errors import InvalidInput

METRICS: dict[str, Any] = {"metrics": {}, "digest": "d"}


def traces(accuracy: float, prompts: int, seed: int, each: int = 1) -> dict[int, list[float]]:
    """Return the feedback on a model that answers a share of the requests well."""
    random = np.random.default_rng(seed)
    return {prompt: (random.random(each) < accuracy).astype(float).tolist() for prompt in range(prompts)}


def test_means_are_over_traces_and_the_difference_is_theirs() -> None:
    champion = {name: [1.0, 0.0] for name in range(20)}
    candidate = {**{name: [1.0] for name in range(20)}, 20: [0.0] * 20}
    report = compare(champion, candidate, Bounds())
    assert (report["champion"]["reward"]["value"], report["champion"]["traces"]) == (0.5, 40)
    assert report["champion"]["reward"]["low"] == report["champion"]["reward"]["high"] == 0.5
    assert report["candidate"]["reward"]["value"] == 0.5
    assert report["difference"]["value"] == 0.0
    # One prompt has half of the traces: whether it is drawn decides, so the interval is wide.
    assert report["difference"]["high"] - report["difference"]["low"] > 0.4
    assert report["decision"] == "hold"


@pytest.mark.parametrize(
    ("accuracy", "prompts", "decision"),
    [
        (0.9, 1000, "promote"),
        (0.8, 4000, "promote"),
        (0.6, 1000, "roll back"),
        (0.8, 100, "hold"),
        (0.1, 19, "hold"),
    ],
)
def test_the_decision_follows_the_interval(accuracy: float, prompts: int, decision: str) -> None:
    assert compare(traces(0.8, prompts, 1), traces(accuracy, prompts, 2), Bounds())["decision"] == decision


def test_equal_models_are_seldom_rolled_back() -> None:
    back = sum(
        compare(traces(0.7, 200, 2 * seed), traces(0.7, 200, 2 * seed + 1), Bounds())["decision"] == "roll back"
        for seed in range(100)
    )
    assert back <= 5


def test_a_candidate_that_passed_its_gate_by_luck_is_found_in_its_traces() -> None:
    """It is worse by 0.1, and of many evaluations of 40 problems a few pass it."""

    def samples(accuracy: float, seed: int) -> list[dict[str, Any]]:
        return [
            {"problem": str(name), "reward": values[0], "rewards": {}}
            for name, values in traces(accuracy, 40, seed).items()
        ]

    lucky = [
        seed
        for seed in range(200)
        if judge(METRICS, samples(0.6, seed), METRICS, samples(0.7, 1000 + seed), Bounds())["outcome"] == "passed"
    ]
    assert lucky
    for seed in lucky:
        report = compare(traces(0.7, 2000, 5000 + seed), traces(0.6, 2000, 6000 + seed), Bounds())
        assert report["decision"] == "roll back"


def test_a_side_without_feedback_is_refused() -> None:
    with pytest.raises(InvalidInput, match="the candidate has no trace with a reward"):
        compare({1: [1.0]}, {}, Bounds())


@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 1.1])
def test_equal_rewards_are_no_reason_to_roll_back(reward: float) -> None:
    champion = {prompt: [reward] * (1 + prompt % 3) for prompt in range(40)}
    candidate = {prompt: [reward] * (1 + prompt % 7) for prompt in range(43)}
    report = compare(champion, candidate, Bounds())
    assert report["difference"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert report["decision"] == "promote"

"""The gate: equal models rarely fail, worse ones do, and few problems decide nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.apps.evaluation.gate import Bounds, judge
from paceline.errors import InvalidInput

ANY_BOUNDS = Bounds()
RESULT: dict[str, Any] = {"digest": "d", "metrics": {"reward": {"value": 0.5, "low": 0.4, "high": 0.6}}}


def samples(values: Any, k: int = 1) -> list[dict[str, Any]]:
    """One entry for each of k samples of each problem."""
    return [
        {"problem": str(index), "reward": float(value), "rewards": {"exact_match": float(value)}}
        for index, row in enumerate(np.reshape(values, (-1, k)))
        for value in row
    ]


def outcome(candidate: Any, baseline: Any, bounds: Bounds = ANY_BOUNDS, **options: Any) -> str:
    verdict = judge(RESULT, samples(candidate), RESULT, samples(baseline), bounds, **options)
    return str(verdict["outcome"])


def of_problems(random: np.random.Generator, chances: Any, worse_by: float = 0.0) -> Any:
    return random.random(len(chances)) < chances - worse_by


@pytest.mark.merge
@pytest.mark.slow
def test_an_equal_model_fails_in_at_most_five_of_a_hundred_seeds() -> None:
    outcomes = []
    for seed in range(100):
        random = np.random.default_rng(seed)
        chances = random.random(300)
        outcomes.append(outcome(of_problems(random, chances), of_problems(random, chances), seed=seed))
    assert outcomes.count("failed") <= 5


@pytest.mark.merge
@pytest.mark.slow
def test_an_equal_model_passes_with_enough_problems() -> None:
    random = np.random.default_rng(0)
    chances = random.random(20_000)
    assert outcome(of_problems(random, chances), of_problems(random, chances)) == "passed"


def test_a_model_that_is_worse_by_fifteen_points_fails_in_every_seed() -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        chances = random.uniform(0.3, 1.0, 400)
        worse, equal = of_problems(random, chances, 0.15), of_problems(random, chances)
        assert outcome(worse, equal, seed=seed) == "failed"
        assert outcome(worse, equal, Bounds(max_drop=0.4), seed=seed) == "passed"


@pytest.mark.parametrize("num_problems", [1, 5, 19])
def test_too_few_problems_decide_nothing(num_problems: int) -> None:
    assert outcome(np.zeros(num_problems), np.ones(num_problems)) == "undecided"
    assert outcome(np.ones(num_problems), np.ones(num_problems)) == "undecided"


def test_noise_beyond_the_margin_decides_nothing() -> None:
    random = np.random.default_rng(1)
    chances = np.full(40, 0.5)
    assert outcome(of_problems(random, chances), of_problems(random, chances)) == "undecided"


def test_a_bound_on_a_metric_fails_a_model_that_is_no_worse() -> None:
    same = np.ones(50)
    assert outcome(same, same, Bounds(minima={"reward": 0.4})) == "passed"
    assert outcome(same, same, Bounds(minima={"reward": 0.6})) == "failed"
    with pytest.raises(InvalidInput, match="no such metric; it has reward"):
        outcome(same, same, Bounds(minima={"accuracy": 0.6}))


def test_a_group_is_judged_alone() -> None:
    ours, theirs = samples(np.ones(60)), samples(np.r_[np.zeros(30), np.ones(30)])
    for each in (ours, theirs):
        for index, sample in enumerate(each):
            sample["groups"] = {"kind": "sums" if index < 30 else "products"}
    verdicts = {
        kind: judge(RESULT, ours, RESULT, theirs, Bounds(), metric=f"reward[kind={kind}]")
        for kind in ("sums", "products")
    }
    assert [verdicts[kind]["problems"] for kind in verdicts] == [30, 30]
    assert [verdicts[kind]["difference"]["value"] for kind in verdicts] == [1.0, 0.0]
    assert verdicts["sums"]["p"] < 1e-3
    assert verdicts["products"]["p"] == 1.0
    with pytest.raises(InvalidInput, match=r"no problem with 'reward\[kind=x\]' in common"):
        judge(RESULT, ours, RESULT, theirs, Bounds(), metric="reward[kind=x]")


def test_problems_are_paired_by_name_and_their_samples_are_averaged() -> None:
    ours = samples([1, 0, 1, 1] * 20, k=2)
    theirs = list(reversed(samples([1, 0, 0, 1] * 20, k=2)))[2:]
    verdict = judge(RESULT, ours, RESULT, theirs, Bounds(), metric="reward/exact_match")
    assert verdict["problems"] == 39
    assert verdict["unpaired"] == 1
    assert verdict["difference"]["value"] == pytest.approx(0.5 * 19 / 39)
    assert verdict["digests"] == {"candidate": "d", "baseline": "d"}


def test_evaluations_without_a_common_problem_are_refused() -> None:
    theirs = [{**sample, "problem": "other"} for sample in samples(np.ones(30))]
    with pytest.raises(InvalidInput, match="no problem with 'reward' in common"):
        judge(RESULT, samples(np.ones(30)), RESULT, theirs, Bounds())
    with pytest.raises(InvalidInput, match="they have reward, reward/exact_match"):
        outcome(np.ones(30), np.ones(30), metric="reward/other")


def test_equal_rewards_pass_whatever_their_means_round_to() -> None:
    # The mean of 0.1, 0.2 and 0.3 is 0.20000000000000004.
    thrice, once = samples([[0.1, 0.2, 0.3]] * 30, k=3), samples([0.2] * 30)
    for candidate, baseline in ((once, thrice), (thrice, once)):
        verdict = judge(RESULT, candidate, RESULT, baseline, ANY_BOUNDS)
        assert verdict["outcome"] == "passed"
        assert verdict["difference"] == {"value": 0.0, "low": 0.0, "high": 0.0}


@pytest.mark.parametrize(("ours", "theirs"), [(0.3, 0.4), (0.9, 1.0), (0.6, 0.7), (0.1, 0.2), (1.1, 1.2)])
def test_a_drop_as_large_as_is_accepted_does_not_fail(ours: float, theirs: float) -> None:
    assert outcome([ours] * 30, [theirs] * 30, Bounds(max_drop=0.1)) == "passed"
    assert outcome([ours - 0.001] * 30, [theirs] * 30, Bounds(max_drop=0.1)) == "failed"


@pytest.mark.parametrize("bound", [0.1, 0.3, 0.7, 0.95, 1 / 3])
def test_a_metric_at_its_bound_is_within_it(bound: float) -> None:
    stored = float(np.mean([float(np.float32(bound))] * 10))  # 0.7 is 0.699999988 in float32
    result = {"digest": "d", "metrics": {"reward": {"value": stored}}}
    equal = samples([1.0] * 30)
    for bounds in (Bounds(minima={"reward": bound}), Bounds(maxima={"reward": bound})):
        assert judge(result, equal, RESULT, equal, bounds)["outcome"] == "passed"
    for bounds in (Bounds(minima={"reward": bound + 1e-4}), Bounds(maxima={"reward": bound - 1e-4})):
        assert judge(result, equal, RESULT, equal, bounds)["outcome"] == "failed"

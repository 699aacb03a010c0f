"""The sequential test by simulation: a biased worker is named soon, a correct bfloat16 worker never."""

from __future__ import annotations

import math

import numpy as np
import pytest
from recorded_noise import load_noise

from paceline.groups import Completion, Group, VersionSpan
from paceline.learner.step.sampler_check import difference
from paceline.services.coordinator.exchange.spot_check import (
    MAX_WORKERS,
    DriftTest,
    Finding,
    Observation,
    SpotCheck,
)

GROUPS = 10_000
AT_ONCE = 250
"""Groups that are simulated together."""

NOISES = {
    "short": (4, (12, 32), 0.02, 0.0005),
    "usual": (8, (50, 400), 0.02, 0.001),
    "long": (8, (500, 2000), 0.03, 0.001),
    "coarse": (8, (50, 400), 0.05, 0.002),
}
"""Completions, lengths, scale of a token's difference in nats, and scale of the part that a group's tokens share."""


def observations(noise: str, number: int, rng: np.random.Generator, bias: float = 0.0) -> list[Observation]:
    """Groups of a bfloat16 sampler: heavy-tailed differences by token (Student's t with 3 degrees of freedom), a part that the
    tokens of a group share, and the mean of σ²/2 that sampling from the noisy distribution gives."""
    completions, (shortest, longest), scale, shared = NOISES[noise]
    lengths_GC = rng.integers(shortest, longest + 1, (number, completions))
    common_G = shared * rng.standard_t(3, number)
    groups: list[Observation] = []
    for start in range(0, number, AT_ONCE):
        lengths_SC = lengths_GC[start : start + AT_ONCE]
        sizes_S = lengths_SC.sum(axis=1)
        shift_S = scale**2 / 2 + common_G[start : start + AT_ONCE] + bias
        values_T = scale * rng.standard_t(3, sizes_S.sum()) / math.sqrt(3) + np.repeat(shift_S, sizes_S)
        values_T = values_T.clip(-1, 1)
        means_S = np.add.reduceat(values_T, starts(sizes_S)) / sizes_S
        values_T -= np.repeat(means_S, sizes_S)
        sums_SC = np.add.reduceat(values_T, starts(lengths_SC.ravel())).reshape(lengths_SC.shape)
        by_completions_S = np.sqrt((sums_SC**2).sum(axis=1) * completions / (completions - 1)) / sizes_S
        by_tokens_S = np.sqrt(np.add.reduceat(values_T**2, starts(sizes_S))) / sizes_S
        errors_S = np.maximum(by_completions_S, by_tokens_S)
        groups += map(Observation, means_S.tolist(), errors_S.tolist(), sizes_S.tolist())
    return groups


def starts(sizes: np.ndarray) -> np.ndarray:
    """Return the index of the first token of each part."""
    return np.concatenate(([0], sizes.cumsum()[:-1]))


def until_named(test: DriftTest, groups: list[Observation]) -> tuple[int, Finding]:
    """Return the number of groups after which the worker is named, and the finding."""
    for number, observation in enumerate(groups, 1):
        finding = test.observe("wrong", observation)
        if finding is not None:
            return number, finding
    raise AssertionError(f"not named in {len(groups)} groups")


@pytest.mark.parametrize("noise", ["short", "usual", "coarse"])
def test_a_correct_worker_is_never_named_in_ten_thousand_groups(noise: str) -> None:
    rng, test = np.random.default_rng(7), DriftTest()
    alarms = sum(
        test.observe(f"honest-{number % 2}", observation) is not None
        for number, observation in enumerate(observations(noise, GROUPS, rng))
    )
    print(f"{noise}: {alarms} false alarms in {GROUPS} compared groups")
    assert alarms == 0
    assert test.named == []
    assert test.groups == GROUPS


RECORDINGS = ("native-float32", "vllm-float32", "vllm-bfloat16", "vllm-bfloat16-learner-float32")


def recorded(name: str, number: int, rng: np.random.Generator, fault: float = 0.0) -> list[Observation]:
    """Observations of groups of four recorded completions, drawn with replacement. With `fault`, the token probabilities
    are also those of other weights, with this Kullback-Leibler divergence in nats: heavy-tailed differences (Student's t
    with 3 degrees of freedom) whose mean square is twice as large."""
    completions, number_format = load_noise(name), name.split("-")[1]
    groups = []
    for _ in range(number):
        drawn = [completions[i] for i in rng.integers(0, len(completions), 4)]
        if fault:
            scale = math.sqrt(2 * fault / 3)
            drawn = [each + fault + scale * rng.standard_t(3, len(each)) for each in drawn]
        found = difference(0, "", 0, drawn, number_format)
        groups.append(Observation(found.mean, found.standard_error, found.tokens, found.mean_square, number_format))
    return groups


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_real_engine_is_never_named_in_ten_thousand_groups(name: str) -> None:
    test = DriftTest()
    groups = recorded(name, GROUPS, np.random.default_rng(11))
    alarms = sum(test.observe(f"honest-{i % 2}", each) is not None for i, each in enumerate(groups))
    print(f"{name}: {alarms} false alarms; spread {test.largest_spread:.2g}, mean {test.largest_mean:+.2g} nats")
    assert alarms == 0
    assert test.groups == GROUPS


@pytest.mark.parametrize("name", ["native-float32-layer", "native-float32-temperature"])
def test_a_recorded_fault_is_named_after_two_groups(name: str) -> None:
    groups = recorded(name, 10, np.random.default_rng(3))
    number, finding = until_named(DriftTest(), groups)
    assert number == 2
    assert "scatter" in finding.explain()


@pytest.mark.parametrize("name", RECORDINGS)
def test_weights_that_are_off_by_a_hundredth_of_a_nat_are_named_in_few_groups(name: str) -> None:
    numbers = []
    for seed in range(20):
        rng, test = np.random.default_rng(seed), DriftTest()
        for observation in recorded(name, 8, rng):
            assert test.observe("honest", observation) is None
        numbers.append(until_named(test, recorded(name, 100, rng, fault=0.01))[0])
    print(f"{name}: named after {numbers} compared groups")
    assert max(numbers) <= 12


@pytest.mark.parametrize("noise", sorted(NOISES))
@pytest.mark.parametrize("bias", [0.01, -0.01])
def test_a_hundredth_of_a_nat_is_named(noise: str, bias: float) -> None:
    rng, test = np.random.default_rng(3), DriftTest()
    for observation in observations(noise, 4, rng):
        assert test.observe("honest", observation) is None
    number, finding = until_named(test, observations(noise, 500, rng, bias))
    print(f"{noise}, {bias:+}: named after {number} compared groups, mean {finding.mean:+.4f}")
    assert math.copysign(1, finding.mean) == math.copysign(1, bias)
    assert finding.others is not None
    assert abs(finding.others) < 0.003
    assert test.named == ["wrong"]


def test_two_compared_groups_are_enough_where_completions_are_long() -> None:
    rng, test = np.random.default_rng(5), DriftTest()
    for observation in observations("long", 4, rng):
        test.observe("honest", observation)
    number, _ = until_named(test, [Observation(0.0112, 0.0004, 8000)] * 2)
    assert number == 2


def test_a_worker_that_breaks_late_is_named_too() -> None:
    rng, test = np.random.default_rng(9), DriftTest()
    for observation in observations("usual", 1000, rng):
        assert test.observe("wrong", observation) is None
    until_named(test, observations("usual", 100, rng, 0.01))


@pytest.mark.parametrize("noise", ["short", "coarse"])
@pytest.mark.parametrize("bias", [0.01, -0.01])
def test_a_worker_that_breaks_late_is_named_within_a_thousand_of_its_groups(noise: str, bias: float) -> None:
    """With the usual `logger.verify_share`: after a first hint its next groups are all compared."""
    rng, check = np.random.default_rng(4), SpotCheck(seed=2)
    groups = {
        "wrong": [*observations(noise, 600, rng), *observations(noise, 1000, rng, bias)],
        "honest": observations(noise, 1600, rng),
    }
    named: dict[str, int] = {}
    ids, logprobs = np.zeros(1, np.int32), np.zeros(1, np.float32)
    ids, logprobs = np.zeros(1, np.int32), np.zeros(1, np.float32)
    for step in range(1600):
        for number, worker in enumerate(groups):
            span = VersionSpan(1, step, 0, 1, worker)
            check.note_group(Group(2 * step + number, ids, (Completion(ids, logprobs, (span,), "stop"),)))
        chosen = check.choose(str(step), (0, 1), [2 * step, 2 * step + 1], 0.002, 2)
        for worker in [worker for number, worker in enumerate(groups) if 2 * step + number in chosen]:
            if check.observe(worker, groups[worker][step]) is not None:
                named.setdefault(worker, step)
    print(f"{noise}, {bias:+}: named {named['wrong'] - 600} groups after it broke")
    assert list(named) == ["wrong"]
    assert 600 <= named["wrong"] < 1600


def test_no_single_group_names_a_worker_and_bad_numbers_are_ignored() -> None:
    test = DriftTest()
    assert test.observe("a", Observation(1.0, 1e-6, 1000)) is None
    for mean, error, tokens in ((math.nan, 0.1, 5), (0.1, math.inf, 5), (0.1, 0.1, 0)):
        assert test.observe("a", Observation(mean, error, tokens)) is None
    assert test.groups == 1


def test_the_number_of_workers_is_bounded() -> None:
    test = DriftTest()
    for number in range(MAX_WORKERS + 10):
        test.observe(str(number), Observation(0.0, 0.001, 10))
    assert len(test._workers) == MAX_WORKERS

"""Advantages against numbers worked out by hand, and against exact fractions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.advantages import (
    Episode,
    Preset,
    advantages,
    discounted_turns,
    gdpo_scores,
    group_advantages,
    group_totals,
    has_advantage,
    have_advantage,
    turn_level,
)
from paceline.spec import RunSpec

NAN = math.nan


@pytest.mark.parametrize(
    ("preset", "high", "low"),
    [
        # mean 1/2, sample std 1/√3: ±0.5 / (0.57735 + 0.0001)
        ("trl", 0.5 / (math.sqrt(1 / 3) + 1e-4), -0.5 / (math.sqrt(1 / 3) + 1e-4)),
        # the others of a 1 are [0, 0, 1]: mean 1/3, std 1/√3
        ("nemo", (2 / 3) / (math.sqrt(1 / 3) + 1e-6), -(2 / 3) / (math.sqrt(1 / 3) + 1e-6)),
        ("dr_grpo", 0.5, -0.5),
        ("rloo", 2 / 3, -2 / 3),
    ],
)
def test_two_of_four(preset: Preset, high: float, low: float) -> None:
    np.testing.assert_allclose(advantages(np.array([1.0, 0, 0, 1]), preset), [high, low, low, high], rtol=1e-12)


@pytest.mark.parametrize(
    ("preset", "high", "low", "digits"),
    [
        ("trl", 1.4997, -0.4999, 4),
        ("nemo", 1.0, -0.57735, 5),  # the others of the 1 are equal, so their std 0 does not divide
        ("dr_grpo", 0.75, -0.25, 12),
        ("rloo", 1.0, -1 / 3, 12),
    ],
)
def test_one_of_four(preset: Preset, high: float, low: float, digits: int) -> None:
    np.testing.assert_allclose(
        advantages(np.array([1.0, 0, 0, 0]), preset), [high, low, low, low], atol=0.6 * 10**-digits
    )


@pytest.mark.parametrize("preset", ["trl", "nemo", "dr_grpo", "rloo"])
def test_rows_without_a_reward_neither_train_nor_count(preset: Preset) -> None:
    alone = advantages(np.array([1.0, 0, 0, 1]), preset)
    mixed = advantages(np.array([1.0, NAN, 0, 0, NAN, 1]), preset)
    np.testing.assert_array_equal(mixed, [alone[0], 0, alone[1], alone[2], 0, alone[3]])


@pytest.mark.parametrize("preset", ["trl", "nemo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("totals", [[0.3, 0.3, 0.3], [NAN, 2.0, NAN], [NAN, NAN], []])
def test_no_contrast_no_advantage(preset: Preset, totals: list[float]) -> None:
    np.testing.assert_allclose(advantages(np.array(totals), preset), np.zeros(len(totals)), atol=1e-12)


def test_two_completions_leave_one_out_has_no_std() -> None:
    np.testing.assert_array_equal(advantages(np.array([1.0, 0]), "nemo"), [1, -1])


def test_unknown_preset() -> None:
    with pytest.raises(ValueError, match="'gae'"):
        advantages(np.array([1.0, 0]), "gae")  # type: ignore[arg-type]


def test_discounted_rewards_to_go_are_relative_to_all_turns_of_the_group() -> None:
    group = [
        Episode(1.0, 0.0, np.array([NAN, 2.0])),  # last turn: 2 + 1 = 3; first: 0 + 0.5 * 3 = 1.5
        Episode(NAN, 0.0, np.array([0.5])),  # no outcome, but a turn's reward
        Episode(NAN, 0.0, np.array([NAN])),  # no reward at all
    ]
    first, second, third = discounted_turns(group, 0.5, "dr_grpo")
    mean = (1.5 + 3.0 + 0.5) / 3
    assert first.tolist() == pytest.approx([1.5 - mean, 3.0 - mean])
    assert second.tolist() == pytest.approx([0.5 - mean])
    assert third.tolist() == [0.0]


def test_without_discount_and_turn_rewards_every_turn_has_the_outcome() -> None:
    group = [Episode(1.0, 0.0, np.full(3, NAN)), Episode(0.0, 0.0, np.full(3, NAN))]
    first, second = discounted_turns(group, 1.0, "dr_grpo")
    assert first.tolist() == [0.5, 0.5, 0.5]
    assert second.tolist() == [-0.5, -0.5, -0.5]


def test_turns_are_compared_with_the_same_turn_of_other_samples() -> None:
    group = [
        Episode(1.0, 0.25, np.array([1.0, NAN])),
        Episode(0.0, -0.25, np.array([0.0, 4.0])),
        Episode(0.0, 0.0, np.array([NAN])),
    ]
    first, second, third = turn_level(group, 2.0, "dr_grpo")
    assert first.tolist() == [0.25 + 2 * 0.5, 0.25]
    assert second.tolist() == [-0.25 - 2 * 0.5, -0.25]  # turn 1 has no other to compare with
    assert third.tolist() == [0.0]


def test_a_group_without_turns_has_no_advantages() -> None:
    assert [a.tolist() for a in turn_level([Episode(1.0, 0.5, np.zeros(0))], 1.0, "trl")] == [[]]
    assert [a.tolist() for a in discounted_turns([Episode(1.0, 0.5, np.zeros(0))], 1.0, "trl")] == [[]]


def spec_of(weights: Sequence[float], advantage: str = "trl", **sections: Any) -> RunSpec:
    rewards = [{"function": "length", "name": f"f{i}", "weight": weight} for i, weight in enumerate(weights)]
    grpo = {"advantage": advantage, "num_prompts_per_step": 2, "num_generations_per_prompt": 2}
    policy = {"model_name": "none", "generation": {"max_new_tokens": 8}}
    tree = {"name": "test", "policy": policy, "data": {"train": "a.jsonl"}, "grpo": grpo, "rewards": rewards}
    return RunSpec.model_validate(tree | sections)


PARTS = [
    Fraction(0),
    Fraction(1),
    Fraction(1, 10),
    Fraction(3, 10),
    Fraction(7, 10),
    Fraction(4, 5),
    Fraction(1, 5),
]
PARTS += [Fraction(1, 3), Fraction(2, 3), Fraction(-1, 2), None]  # type: ignore[list-item]
WEIGHTS = ["0.1", "0.2", "0.3", "0.7", "1", "-0.3", "2.5"]
Column = list[Fraction | None]


def exact_relative(column: Column, preset: str) -> list[Decimal]:
    """The formula of a preset on exact numbers, with 50 digits where a root is taken."""
    known = [value for value in column if value is not None]
    if len(known) < 2:
        return [Decimal(0)] * len(column)

    def std(values: Sequence[Fraction]) -> Decimal:
        mean = sum(values, Fraction(0)) / len(values)
        return decimal(sum(((v - mean) ** 2 for v in values), Fraction(0)) / (len(values) - 1)).sqrt()

    found = []
    for index, value in enumerate(column):
        if value is None:
            found.append(Decimal(0))
            continue
        others = [v for i, v in enumerate(column) if v is not None and i != index]
        centred = decimal(value - sum(known, Fraction(0)) / len(known))
        difference = decimal(value - sum(others, Fraction(0)) / len(others))
        match preset:
            case "trl":
                found.append(centred / (std(known) + Decimal("1e-4")))
            case "dr_grpo":
                found.append(centred)
            case "rloo":
                found.append(difference)
            case _:
                alike = len(set(others)) == 1
                found.append(difference if alike else difference / (std(others) + Decimal("1e-6")))
    return found


def decimal(value: Fraction) -> Decimal:
    return Decimal(value.numerator) / Decimal(value.denominator)


def exact(rows: list[Column], weights: Sequence[str], preset: str) -> list[Decimal]:
    with localcontext() as context:
        context.prec = 50
        if preset == "gdpo":
            columns = [exact_relative([row[f] for row in rows], "trl") for f in range(len(weights))]
            terms = [[Decimal(weight) * z for z in column] for weight, column in zip(weights, columns, strict=True)]
            return [sum(of_row, Decimal(0)) for of_row in zip(*terms, strict=True)]
        totals: Column = [
            None
            if all(part is None for part in row)
            else sum(
                (Fraction(w) * part for w, part in zip(weights, row, strict=True) if part is not None),
                Fraction(0),
            )
            for row in rows
        ]
        return exact_relative(totals, preset)


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[Column], list[str]]:
    """Groups with few different rows, so that equal totals, equal others and single outliers are frequent."""
    functions = draw(st.integers(1, 4))
    weights = draw(st.lists(st.sampled_from(WEIGHTS), min_size=functions, max_size=functions))
    kinds = draw(
        st.lists(st.lists(st.sampled_from(PARTS), min_size=functions, max_size=functions), min_size=1, max_size=3)
    )
    return draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=9)), weights


def as_stored(rows: list[Column]) -> np.ndarray:
    """The rewards as they travel: float32, NaN for None."""
    return np.array([[NAN if part is None else float(part) for part in row] for row in rows], np.float32)


@given(group=groups())
@settings(max_examples=120, deadline=None, derandomize=True)
def test_advantages_are_those_of_exact_fractions(group: tuple[list[Column], list[str]]) -> None:
    rows, weights = group
    rewards_CF = as_stored(rows)
    for preset in ("trl", "nemo", "dr_grpo", "rloo", "gdpo"):
        spec = spec_of([float(w) for w in weights], preset)
        expected = [float(value) if abs(value) > Decimal("1e-30") else 0.0 for value in exact(rows, weights, preset)]
        computed = group_advantages(rewards_CF, spec, 0)
        np.testing.assert_allclose(computed, expected, rtol=2e-4, atol=1e-6, err_msg=preset)
        assert bool(computed.any()) == any(expected), f"a group of equal rewards has exactly no advantage ({preset})"
        assert has_advantage(rewards_CF, spec, 0) == any(expected), preset
        batch_GCF = np.stack([rewards_CF, np.roll(rewards_CF, 1, axis=0), np.zeros_like(rewards_CF)])
        totals_GC = group_totals(batch_GCF, spec.rewards, 0)
        np.testing.assert_array_equal(totals_GC[1], group_totals(batch_GCF[1], spec.rewards, 0))
        assert have_advantage(batch_GCF, totals_GC, spec, 0).tolist() == [any(expected), any(expected), False], preset


THIRD, TWO_THIRDS = 1 / 3, 2 / 3
EQUAL: list[tuple[list[float], list[list[float]]]] = [
    # weights, rows of one total
    ([0.7], [[1.0], [1.0]]),
    ([0.1], [[0.3], [0.3]]),
    ([0.1, 0.2, 0.3], [[1, 1, 0], [0, 0, 1]]),
    ([1.0, 1.0], [[0.8, 0.2], [1.0, 0.0]]),
    ([1.0, 1.0], [[0.1, 0.7], [0.8, 0.0]]),
    ([1.0, 1.0], [[THIRD, TWO_THIRDS], [1.0, 0.0]]),
    ([1.0, 1.0, 1.0], [[THIRD, THIRD, THIRD], [1.0, 0.0, 0.0]]),
    ([0.7, 0.3], [[1, 1], [1, 1]]),
    ([0.3, 0.1], [[1, 0], [0, 3]]),
    ([0.1, -0.1], [[1, 1], [0, 0]]),
    ([0.1, 0.2, -0.3], [[1, 1, 1], [0, 0, 0]]),
    ([1.0, 0.5], [[1, 0], [0, 2]]),
    ([1.0, 1.0], [[NAN, 0.5], [0.2, 0.3]]),
    ([0.0, 1.0], [[5.0, 0.4], [9.0, 0.4]]),
    ([1e-9], [[1.0], [1.0]]),
    ([1e6, 1e6], [[0.1, 0.7], [0.8, 0.0]]),
    ([1 / 7, 1.0], [[7.0, 0.0], [0.0, 1.0]]),
]
DIFFERENT: list[tuple[list[float], list[list[float]]]] = [
    # weights, two rows: no rounding makes them equal
    ([0.7], [[1.0], [0.0]]),
    ([1.0], [[1.0], [float(np.nextafter(np.float32(1), np.float32(2)))]]),
    ([1e-9], [[1.0], [0.0]]),
    ([1e-12], [[1.0], [0.5]]),
    ([1.0], [[1e-8], [2e-8]]),
    ([1e6, 1e-3], [[1, 1], [1, 0]]),
    ([1.0, 1.0], [[1e6, 0.05], [1e6, 0.0]]),
    ([1.0, 1.0], [[1e7, 1.0], [1e7, 0.0]]),
    ([1.0, 1.0], [[0.8, 0.2], [1.0, 1e-5]]),
    ([1.0, 1.0], [[THIRD, THIRD], [TWO_THIRDS, 1e-6]]),
    ([0.1, 0.2], [[1, 1], [0, 1.6]]),
    ([1.0, -1.0], [[0.3, 0.3], [0.3, 0.2999]]),
    ([1.0, 1.0], [[NAN, 0.5], [0.2, 0.30001]]),
]


@pytest.mark.parametrize(("weights", "rows"), EQUAL)
@pytest.mark.parametrize("size", [2, 8])
def test_equal_totals_train_nothing_whatever_their_parts(
    weights: list[float], rows: list[list[float]], size: int
) -> None:
    rewards_CF = np.array((rows * size)[:size], np.float32)
    for preset in ("trl", "nemo", "dr_grpo", "rloo", "trl_batch", "reinforce_pp_baseline"):
        spec = spec_of(weights, preset)
        assert not has_advantage(rewards_CF, spec, 0)
        assert group_advantages(rewards_CF, spec, 0).tolist() == [0.0] * size


@pytest.mark.parametrize(("weights", "rows"), EQUAL)
def test_one_outlier_among_equal_totals_is_left_undivided(weights: list[float], rows: list[list[float]]) -> None:
    scale = max(abs(w) for w in weights)
    rewards_CF = np.array([*(rows * 4)[:7], [1.0 / w if w == scale else 0.0 for w in weights]], np.float32)
    rewards_CF[7] += np.nan_to_num(rewards_CF[0])  # each outlier is above the others
    *others, last = group_advantages(rewards_CF, spec_of(weights, "nemo"), 0)
    totals = np.nansum(np.float64(rewards_CF) * weights, axis=1)
    assert last == pytest.approx(totals[7] - totals[0], rel=1e-6)
    assert max(map(abs, others)) < 1, "the others differ by one reward of eight"


@pytest.mark.parametrize(("weights", "rows"), DIFFERENT)
@pytest.mark.parametrize("preset", ["trl", "nemo", "dr_grpo", "rloo", "trl_batch"])
def test_a_true_difference_is_an_advantage_however_small(
    weights: list[float], rows: list[list[float]], preset: str
) -> None:
    rewards_CF = np.array(rows, np.float32)
    assert has_advantage(rewards_CF, spec_of(weights, preset), 0)
    assert group_advantages(rewards_CF, spec_of(weights, preset), 0).all()


@pytest.mark.parametrize(
    ("rewards", "last"),
    [
        ([0.7] * 7 + [0.0], -0.7),
        ([0.1, 0.1, 0.1, 1.0], 0.9),
        ([0.8 + 0.2, 1.0, 0.8 + 0.2, 0.0], -1.0),
        ([0.1 + 0.7, 0.8, 0.7 + 0.1, 0.3], -0.5),
        ([0.35] * 7 + [0.0], -0.35),
        ([0.4, 0.4, 0.4, 0.4, 1.0], 0.6),
        ([0.1 + 0.2, 0.3, 0.3, 0.6], 0.3),
        ([0.3, 0.3, NAN, 0.0], -0.3),
    ],
)
def test_the_others_of_an_outlier_are_equal_but_for_rounding(rewards: list[float], last: float) -> None:
    assert advantages(np.array(rewards), "nemo")[-1] == pytest.approx(last, rel=1e-9)


def test_equal_rewards_have_equal_advantages() -> None:
    rewards = np.array([0.1, 0.7, 0.3, 0.1, 0.7, 0.1, 0.3])
    for preset in ("trl", "nemo", "dr_grpo", "rloo"):
        found = advantages(rewards, preset)  # type: ignore[arg-type]
        assert len(set(found.tolist())) == 3, preset


def test_a_kl_in_the_reward_is_no_difference_of_rewards() -> None:
    rewards_CF = np.array([[1.0]] * 7 + [[0.0]], np.float32)
    penalties = np.array([1e-8, 2e-8, 0.0, 3e-8, 1e-8, 0.0, 2e-8, 0.0])
    found = group_advantages(rewards_CF, spec_of([0.7], "nemo"), 0, penalties)
    assert found[-1] == pytest.approx(-0.7)


@pytest.mark.parametrize(
    ("rows", "weights", "has"),
    [
        ([[1, 0], [0, 1]], [1.0, 1.0], False),  # cancels: z is equal
        ([[1, 0], [0, 2]], [1.0, 0.5], True),  # equal totals, but each function is normalised by itself
        ([[1, 0], [1, 0]], [1.0, 0.5], False),
        ([[1, 3], [0, 3]], [0.0, 0.5], False),  # what differs has no weight
        ([[1, 0, 1], [0, 1, 0]], [0.1, 0.3, 0.2], False),  # 0.1 + 0.2 - 0.3
        (
            [[1, NAN], [NAN, 1]],
            [1.0, 1.0],
            False,
        ),  # each function has one reward, which nothing is compared with
        ([[NAN, NAN], [NAN, NAN]], [1.0, 1.0], False),
        ([[0.1, 0.7], [0.8, 0.0]], [1.0, 1.0], False),
        ([[0.1, 0.7], [0.8, 0.1]], [1.0, 1.0], True),
    ],
)
def test_gdpo_asks_for_each_function(rows: list[list[float]], weights: list[float], has: bool) -> None:
    rewards_CF = np.array(rows, np.float32)
    assert has_advantage(rewards_CF, spec_of(weights, "gdpo"), 0) is has
    assert bool(gdpo_scores(rewards_CF, weights).any()) is has


@pytest.mark.parametrize(
    ("advantage", "sections"),
    [("reinforce_pp", {}), ("gae", {}), ("rloo", {"loss_fn": {"preset": "rloo"}})],
)
def test_equal_rewards_decide_nothing_without_a_comparison_within_the_group(
    advantage: str, sections: dict[str, Any]
) -> None:
    spec = spec_of([1.0], advantage, **sections)
    assert not spec.rewards_decide_advantages
    assert has_advantage(np.array([[1.0], [1.0]], np.float32), spec, 0)
    assert not has_advantage(np.array([[NAN], [NAN]], np.float32), spec, 0)


@pytest.mark.parametrize(
    ("environment", "rewards", "turns", "has"),
    [
        ({"advantage": "turn_level"}, [1, 1], [[0, 1], [0, 0]], True),
        ({"advantage": "turn_level"}, [1, 1], [[0.5, NAN], [0.5]], False),
        ({"advantage": "turn_level"}, [1, 0], [[0], [1]], False),  # outcome and turn cancel
        ({"advantage": "turn_level", "turn_weight": 0.0}, [1, 1], [[0, 1], [0, 0]], False),
        ({"advantage": "turn_level"}, [1, 0], [[NAN], [NAN]], True),
        ({"advantage": "discounted"}, [1, 1], [[NAN, NAN], [NAN]], False),
        ({"advantage": "discounted"}, [0.3, 0.1], [[0.0], [0.2]], False),
        ({"advantage": "discounted"}, [1, 1], [[0.5], [NAN]], True),
        ({"advantage": "discounted", "turn_discount": 0.9}, [1, 1], [[NAN, NAN], [NAN]], True),
        ({"advantage": "discounted", "turn_discount": 0.9}, [0, 0], [[NAN, NAN], [NAN]], False),
        ({"advantage": "discounted"}, [NAN, NAN], [[0.5], [0.1]], True),
        ({"advantage": "discounted"}, [NAN, NAN], [[NAN], [NAN]], False),
    ],
)
def test_rewards_of_turns_decide_too(
    environment: dict[str, Any], rewards: list[float], turns: list[list[float]], has: bool
) -> None:
    spec = spec_of([1.0], "dr_grpo", environment={"class": "a.py:A", **environment})
    rewards_CF = np.array(rewards, np.float32)[:, None]
    found = has_advantage(rewards_CF, spec, 0, [np.array(np.float32(row), np.float64) for row in turns])
    assert found is has


@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_returns_that_are_equal_but_for_rounding_are_left_undivided(discount: float) -> None:
    rewards = [([0.1], 0.2), ([0.2], 0.1), ([0.3], 0.0), ([0.3 - 0.3 * discount, 0.1], 0.2), ([NAN], 9.0)]
    group = [
        Episode(float(np.float32(outcome)), 0.0, np.array(np.float32(rewards_K), np.float64))
        for rewards_K, outcome in rewards
    ]
    found = np.concatenate(discounted_turns(group, discount, "nemo"))
    assert found[-1] == pytest.approx(8.7, rel=1e-6)

"""Advantages of a whole batch against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tiny_policy import CPU, make_spec
from torch import Tensor

from paceline.advantages import advantages, group_preset, has_advantage
from paceline.learner.advantages import ScoredBatch, batch_advantages, whitened_token_advantages
from paceline.spec import RunSpec

NAN = math.nan


def spec_with(advantage: str, functions: int = 1, second: Any = None, **loss_fn: Any) -> RunSpec:
    spec = make_spec("nowhere", grpo={"advantage": advantage}, loss_fn=loss_fn)  # type: ignore[arg-type]
    rewards = [{"function": "length", "name": f"f{i}", "weight": 1.0 + i} for i in range(functions)]
    rewards[1:] = [each | (second or {}) for each in rewards[1:]]
    return RunSpec.model_validate({**spec.model_dump(), "rewards": rewards})


def scored(groups: list[int], rewards: list[Any], penalties: list[float] | None = None) -> ScoredBatch:
    rewards_SF = np.array(rewards, np.float64).reshape(len(groups), -1)
    return ScoredBatch(np.array(groups), rewards_SF, np.array(penalties or [0.0] * len(groups)))


def test_std_of_the_batch() -> None:
    # Groups [3, 1] and [0, 0, None]: centred ±1 and 0; rewards 3, 1, 0, 0 have mean 1 and sample variance 6/3.
    got = batch_advantages(scored([7, 7, 9, 9, 9], [3, 1, 0, 0, NAN]), spec_with("trl_batch"))
    scale = math.sqrt(2) + 1e-4
    np.testing.assert_allclose(got, [1 / scale, -1 / scale, 0, 0, 0], rtol=1e-12, atol=1e-15)


def test_each_reward_normalised_by_itself() -> None:
    # Function 0 (weight 1): group 7 has ±1/(√2 + 1e-4) from [2, 0]; group 9 nothing. Function 1 (weight 2): group 7
    # nothing, group 9 ∓5/(√50 + 1e-4) from [0, 10]. Their scale no longer matters.
    a, b = 1 / (math.sqrt(2) + 1e-4), 2 * 5 / (math.sqrt(50) + 1e-4)
    # The scores a, -a, -b, b have mean 0 and sample variance 2(a² + b²)/3.
    scale = math.sqrt(2 * (a * a + b * b) / 3) + 1e-4
    got = batch_advantages(scored([7, 7, 9, 9], [[2, 1], [0, 1], [5, 0], [5, 10]]), spec_with("gdpo", functions=2))
    np.testing.assert_allclose(got, [a / scale, -a / scale, -b / scale, b / scale], rtol=1e-12)


def test_a_function_that_does_not_apply_leaves_the_others() -> None:
    rewards = [[1, NAN], [0, NAN], [NAN, NAN], [3, 1], [2, 0]]
    got = batch_advantages(scored([7, 7, 7, 9, 9], rewards), spec_with("gdpo", functions=2))
    assert got[2] == 0
    # Scores z, -z (group 7), 3z, -3z (group 9: both functions, weights 1 + 2): mean 0.
    np.testing.assert_allclose(got[3] / got[0], 3, rtol=1e-6)
    np.testing.assert_allclose(got[[0, 3]], -got[[1, 4]], rtol=1e-12)


def test_a_kl_in_the_reward_moves_the_baseline_too() -> None:
    # Rewards less KL: [1 - 0.2, 0 - 0.4, 0]; others' means: -0.2, 0.4, 0.2.
    got = batch_advantages(scored([5, 5, 5], [1, 0, 0], [0.2, 0.4, 0.0]), spec_with("rloo", preset="rloo"))
    np.testing.assert_allclose(got, [0.8 + 0.2, -0.4 - 0.4, 0 - 0.2], rtol=1e-12)


def test_the_bases_of_reinforce_pp() -> None:
    batch = scored([7, 7, 9], [2, 0, NAN], [0.5, 0.5, 0.5])
    np.testing.assert_array_equal(batch_advantages(batch, spec_with("reinforce_pp")), [2, 0, NAN])
    np.testing.assert_array_equal(batch_advantages(batch, spec_with("reinforce_pp_baseline")), [1, -1, NAN])


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_reinforce_pp_whitens_tokens_over_the_batch() -> None:
    # Sequence 0: r = 1, KL 0.1, 0.2, 0.3: returns to go 0.4, 0.5, 0.7; sequence 1: r = 0, KL 0.4: -0.4; then one without.
    rows = [f64(1, 1, 1, 0), f64(NAN, NAN)]
    penalties = [f64(0.1, 0.2, 0.3, 0.4), f64(9, 9)]
    sequences = [torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0])]
    got = whitened_token_advantages(rows, penalties, sequences, CPU)
    raw = [0.4, 0.5, 0.7, -0.4]
    mean = 1.2 / 4
    std = math.sqrt(sum((x - mean) ** 2 for x in raw) / 4)
    assert got[0].tolist() == pytest.approx([(x - mean) / std for x in raw])
    assert got[1].tolist() == [0, 0]


def test_a_kl_that_is_not_a_number_does_not_pass_for_a_missing_reward() -> None:
    got = batch_advantages(scored([5, 5, 5], [1, 0, NAN], [NAN, 0, 0]), spec_with("rloo", preset="rloo"))
    assert np.isnan(got[0])
    assert got[2] == 0
    tokens = whitened_token_advantages([f64(1, 0)], [f64(NAN, 0)], [torch.tensor([0, 1])], CPU)[0]
    assert tokens.isnan().all()


def test_whitening_does_not_see_the_split() -> None:
    values_N, sequence_N = (
        torch.randn(10, generator=torch.Generator().manual_seed(1)).double(),
        torch.arange(10),
    )
    whole = whitened_token_advantages([values_N], [None], [sequence_N], CPU)[0]
    parts = whitened_token_advantages([values_N[:3], values_N[3:]], [None, None], [sequence_N[:3], sequence_N[:7]], CPU)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)


def test_no_contrast_in_the_batch_is_no_advantage() -> None:
    assert whitened_token_advantages([f64(2, 2)], [None], [torch.tensor([0, 1])], CPU)[0].tolist() == [0, 0]
    assert whitened_token_advantages([], [], [], CPU) == []
    assert batch_advantages(scored([7, 7], [3, 3]), spec_with("gdpo")).tolist() == [0, 0]


@pytest.mark.parametrize("preset", ["trl", "nemo", "dr_grpo", "rloo"])
def test_a_groups_preset_reads_that_group_alone(preset: str) -> None:
    rewards = [1.0, 0.25, math.nan, 0.5, 3.0, 3.5]
    got_S = batch_advantages(scored([7, 7, 7, 7, 9, 9], rewards), spec_with(preset))
    expected = [advantages(np.array(rewards[part]), group_preset(preset)) for part in (slice(4), slice(4, 6))]
    np.testing.assert_array_equal(got_S, np.concatenate(expected))


def test_a_schedule_weighs_by_the_step() -> None:
    schedule = {"weight": 1.0, "weight_schedule": [[0, 1.0], [10, 3.0]]}
    spec = spec_with("reinforce_pp", functions=2, second=schedule)
    batch = scored([7, 7], [[1, 1], [0, 1]])
    assert batch_advantages(batch, spec, step=0).tolist() == [2, 1]
    assert batch_advantages(batch, spec, step=5).tolist() == [3, 2]


@pytest.mark.parametrize("preset", ["reinforce_pp", "gdpo"])
def test_a_closed_gate_takes_the_others_out_of_the_sum(preset: str) -> None:
    spec = spec_with(preset, functions=2, second={"weight": 0.0, "gate_min": 1.0})
    got = batch_advantages(scored([7, 7, 7], [[1, 1], [5, 0], [0, 1]]), spec)
    open_gates = batch_advantages(scored([7, 7, 7], [[1, 1], [0, 1], [0, 1]]), spec)
    np.testing.assert_allclose(got, open_gates)
    assert got[0] > got[1]


def test_seven_of_eight_at_a_weight_that_no_float_holds() -> None:
    # NVIDIA-NeMo/RL#4161, #1518: the std of seven products 0.7 is 1e-16 and not 0.
    spec = spec_with("nemo", second={})
    spec = spec.model_validate(spec.model_dump() | {"rewards": [spec.rewards[0].model_dump() | {"weight": 0.7}]})
    found = batch_advantages(scored([7] * 8, [1, 1, 1, 1, 1, 1, 1, 0]), spec)
    high = (0.7 / 7) / (0.7 / math.sqrt(7) + 1e-6)  # the others of a 1 are six 1 and a 0
    np.testing.assert_allclose(found, [high] * 7 + [-0.7], rtol=1e-9)


@pytest.mark.parametrize("name", ["trl", "nemo", "dr_grpo", "rloo", "trl_batch", "gdpo", "reinforce_pp_baseline"])
def test_a_group_has_an_advantage_if_and_only_if_the_coordinator_says_so(name: str) -> None:
    random = np.random.default_rng(5)
    spec = spec_with(name, functions=3, second={"weight": 0.1})
    values = np.array([0.1, 0.2, 0.3, 1 / 3, 2 / 3, 0.7, 1.0, 0.0, NAN], np.float32)
    groups = [
        values[random.choice(9, size=(1 + kinds, 3))][random.integers(0, 1 + kinds, 4)] for kinds in (0, 1, 2) * 40
    ]
    batch = scored(np.repeat(np.arange(len(groups)), 4).tolist(), list(np.concatenate(groups)))
    found = np.nan_to_num(batch_advantages(batch, spec)).reshape(len(groups), 4)
    says = [has_advantage(rewards_CF, spec, 0) for rewards_CF in groups]
    assert [bool(of_group.any()) for of_group in found] == says
    assert 20 < sum(says) < 100


@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, 1e6 + 0.1, -0.3])
def test_equal_values_whiten_to_exactly_nothing(value: float) -> None:
    raw = [torch.full((7,), value), torch.full((3,), value)]
    sequences = [torch.zeros(7, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)]
    found = whitened_token_advantages(raw, [None, None], sequences, CPU)
    assert torch.cat(found).tolist() == [0.0] * 10
    one_other = whitened_token_advantages(
        [torch.tensor([value] * 9 + [value + 1])], [None], sequences[:1] * 0 + [torch.arange(10)], CPU
    )
    assert one_other[0][-1].item() == pytest.approx(3.0, rel=1e-4)  # 0.9 / √(0.1 · 0.9)

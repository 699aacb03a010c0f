"""Steps with shared prompts against the same steps without: every objective, every pass, groups larger than a row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_policy import CASES, CPU, batch_of, make_batch, make_spec, run_case, with_long_prompts

from paceline.learner.batch.samples import SharedPrompt, TrainingSample, pack_samples, shared_tokens
from paceline.learner.model.policy import load_reference
from paceline.learner.step.plan import Unit, best_units, pack_units, units_of
from paceline.learner.step.reference import LocalReference, _passes

EVERY_CHANGE = ("ppo", "dpo_updates", "lora")
"""Cases that run with each change: a value model, pairs that stay together, an adapter whose reference is the base."""


@pytest.mark.parametrize(
    "name",
    [
        name if name in EVERY_CHANGE else pytest.param(name, marks=[pytest.mark.merge, pytest.mark.slow])
        for name in CASES
    ],
)
def test_every_objective_trains_the_same_and_computes_less(name: str, model: Path) -> None:
    case, batch = CASES[name], batch_of(name)
    batch = batch if name == "shared_prompts" else with_long_prompts(batch)
    metrics, tensors = run_case(model, {**case, "shared_prompts": False}, batch, budget=1000)
    shared_metrics, shared = run_case(model, {**case, "shared_prompts": True}, batch, budget=1000)
    assert metrics["computed_tokens"] == metrics["row_tokens"] == shared_metrics["row_tokens"]
    assert shared_metrics["computed_tokens"] < metrics["computed_tokens"]
    for key in {"loss", "grad_norm", "entropy", "logprob", "tokens", "sequences", "accuracy", "value_loss"} & set(
        metrics
    ):
        assert shared_metrics[key] == pytest.approx(metrics[key], rel=1e-3, abs=1e-3), key
    for key, tensor in tensors.items():
        if key.startswith("grad."):
            torch.testing.assert_close(shared[key], tensor, rtol=1e-4, atol=1e-5)


def test_a_run_with_false_computes_bit_for_bit_what_a_run_without_the_key_does(model: Path) -> None:
    batch = with_long_prompts(make_batch())
    weights = [run_case(model, {"shared_prompts": value}, batch, 40)[1] for value in (False, "auto")]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_steps_repeat_bit_for_bit_with_shared_prompts(model: Path) -> None:
    batch = with_long_prompts(make_batch())
    weights = [run_case(model, {"shared_prompts": True}, batch, 40)[1] for _ in range(2)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def sample(prompt: list[int], completion: list[int], group_id: int = 1) -> TrainingSample:
    return TrainingSample(group_id, np.array(prompt, np.int32), np.array(completion, np.int32))


P = list(range(20))
"""A prompt that is worth to be shared."""


def test_a_row_has_a_prompt_once_and_positions_go_on_from_it() -> None:
    batch = [sample(P, [1, 2, 3]), sample(P, [4]), sample([7, 8], [9, 5], 2), sample(P, [6, 5])]
    packed = pack_samples(batch, CPU, share=True)
    # the last one is no neighbour of its group: it has a prompt by itself
    assert packed.input_ids[0].tolist() == [*P, 1, 2, 7, 8, 9, *P, 6]
    assert packed.position_ids[0].tolist() == [*range(22), 0, 1, 2, *range(21)]
    assert packed.predictors_N.tolist() == [19, 20, 21, 19, 23, 24, 44, 45]
    assert packed.targets_N.tolist() == [1, 2, 3, 4, 9, 5, 6, 5]
    assert packed.sequence_N.tolist() == [0, 0, 0, 1, 2, 2, 3, 3]
    assert packed.layout.shared == (SharedPrompt(0, 20, (2, 0)),)
    assert packed.layout.runs == ((1, 20), (1, 2), (1, 3), (1, 21))
    assert packed.layout.max_length == 22
    whole = packed.layout.unshared
    assert packed.input_ids[0, whole.tokens].tolist() == [*P, *P, 1, 2, 7, 8, 9, *P, 6]
    assert whole.tokens[whole.own].tolist() == list(range(46))
    costs = sum(count * length**2 for count, length in packed.layout.costed_runs)
    assert costs == 22**2 + 3**2 + 21**2  # the second completion has no token behind the prompt


def test_only_equal_tokens_at_the_beginning_are_shared() -> None:
    batch = [sample([*P, 1, 2], [3, 4]), sample([*P, 5], [6]), sample([*P, 1, 7], [8])]
    assert shared_tokens(batch) == 20
    packed = pack_samples(batch, CPU, share=True)
    assert packed.input_ids[0].tolist() == [*P, 1, 2, 3, 5, 1, 7]
    assert packed.position_ids[0].tolist() == [*range(20), 20, 21, 22, 20, 20, 21]
    assert packed.predictors_N.tolist() == [21, 22, 23, 25]
    assert shared_tokens([sample(P, [1]), sample([20, *P], [1])]) == 0
    assert shared_tokens([sample(P[:5], [1])] * 3) == 0  # 10 tokens less are not worth two calls a layer


def test_a_group_larger_than_a_row_has_its_prompt_once_in_each() -> None:
    policy = make_spec(Path("nowhere"), shared_prompts=True, train_mb_tokens=30).policy
    batch = [sample(P, [1] * n) for n in (4, 6, 7, 2, 0)] + [sample([1, 2], [1] * 4, 2), sample(P, [1] * 50, 3)]
    units = units_of(batch, range(len(batch)), policy)
    assert [(unit.indices, unit.tokens) for unit in units] == [((1, 0, 3), 29), ((2,), 26), ((5,), 5), ((6,), 69)]
    assert pack_units(units, 30) == [(6,), (1, 0, 3), (2,), (5,)]
    pairs = units_of(batch, range(len(batch)), policy, whole=True)
    assert pairs[0] == Unit((0, 1, 2, 3), 20 + 3 + 5 + 6 + 1, ((1, 23), (1, 25), (1, 26), (1, 21), (-3, 20)))


def passes_of(batch: list[TrainingSample], budget: int, *, share: bool) -> list[tuple[int, ...]]:
    policy = make_spec(Path("nowhere"), shared_prompts=share, train_mb_tokens=budget).policy
    return pack_units(best_units(batch, range(len(batch)), policy), budget)


def test_groups_of_more_than_half_a_row_take_fewer_passes_than_unshared() -> None:
    dice = np.random.default_rng(1)
    lengths = [[int(n) for n in dice.integers(385, 716, 8)] for _ in range(32)]
    batch = [sample([g] * 100, [1] * n, g) for g, of_group in enumerate(lengths) for n in of_group]
    assert len(passes_of(batch, 8192, share=True)) < len(passes_of(batch, 8192, share=False))
    short = [sample(P, [1] * 5, g) for g in range(3) for _ in range(4)]  # whole groups fit: no prompt is repeated
    assert passes_of(short, 120, share=True) == [(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)]


@pytest.mark.parametrize("seed", range(1, 4))
def test_no_row_has_more_tokens_than_its_budget(seed: int) -> None:
    """Prompts of a group that differ late, lengths with a heavy tail: parts that share more, or too little to pay."""
    dice = np.random.default_rng(seed)
    batch = []
    for group_id in range(60):
        prompt = dice.integers(0, 99, 200)
        for _ in range(12):
            at = int(dice.choice([50, 150, 200]))
            own = np.concatenate((prompt[:at], dice.integers(0, 99, 200 - at)))
            batch.append(sample(own.tolist(), [1] * min(int(dice.pareto(1.2) * 60) + 1, 800), group_id))
    for indices in passes_of(batch, 1024, share=True):
        assert pack_samples([batch[i] for i in indices], CPU, share=True).input_ids.numel() <= 1024


def test_parts_that_meet_in_a_row_take_the_tokens_they_were_counted_with() -> None:
    common, late = [*range(20)], [*range(20), *[7] * 60]
    batch = [sample(late, [1] * 20) for _ in range(4)] + [sample([*common, *[8] * 60], [1] * 20) for _ in range(4)]
    (unit, other) = units_of(batch, range(8), make_spec(Path("nowhere"), shared_prompts=True).policy, row_tokens=400)
    assert (unit.tokens, other.tokens) == (20 + 4 * 79, 20 + 4 * 79)
    row = pack_samples([batch[i] for i in (*unit.indices, *other.indices)], CPU, share=True)
    assert row.input_ids.numel() <= unit.tokens + other.tokens


def test_a_long_completion_more_does_not_end_the_sharing() -> None:
    pair = [sample(P, [1] * 100), sample(P, [1] * 100)]
    assert shared_tokens(pair) == shared_tokens([*pair, sample(P, [1] * 1000)]) == 20


def test_a_precomputed_pass_shares_too(model: Path) -> None:
    batch = [replace(s, group_id=1) for s in with_long_prompts(make_batch()) if s.group_id == 102]
    policies: list[Any] = [make_spec(model, shared_prompts=share).policy for share in (False, True)]
    reference = LocalReference(load_reference(policies[0], CPU), 1.0, 7)
    (apart,), (shared,) = (list(_passes(reference, batch, policy, CPU)) for policy in policies)
    assert shared[1].input_ids.numel() < apart[1].input_ids.numel()
    assert sorted(shared[0]) == sorted(apart[0])
    for place, index in enumerate(shared[0]):
        values_T = apart[2][apart[1].sequence_N == apart[0].index(index)]
        torch.testing.assert_close(shared[2][shared[1].sequence_N == place], values_T, rtol=1e-5, atol=1e-5)

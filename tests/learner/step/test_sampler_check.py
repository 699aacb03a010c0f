"""Samplers against the learner: each token under its own version, whatever the age, the mesh and the kind of group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checked_run import SESSION, checked_steps

from paceline.groups import Completion, Group, Rows, Turn, VersionSpan
from paceline.learner.step.sampler_check import Difference, comparable_spans, difference

STEPS = 7


def by_sampler(found: list[Difference]) -> dict[tuple[int, str, int], Difference]:
    return {(each.group_id % 10, each.sampler, each.version_step): each for each in found}


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "age 0": (0, {}),
    "age 1": (1, {}),
    "age 4": (4, {}),
    "episodes": (2, {"episodes": True}),
    "shared prompts": (2, {"policy": {"shared_prompts": True}}),
    "bfloat16": (
        2,
        {"policy": {"precision": "bfloat16", "generation_precision": "bfloat16"}, "rounded": torch.bfloat16},
    ),
    "adapter": (2, {"policy": {"lora_cfg": {"enabled": True, "dim": 3, "alpha": 64}}}),
}


@pytest.mark.parametrize("name", CASES)
def test_an_old_layer_is_seen_and_right_weights_are_not(model: Path, name: str) -> None:
    max_age, case = CASES[name]
    found, _, _ = checked_steps(model, STEPS, max_age=max_age, **case)
    is_coarse = "precision" in case.get("policy", {})
    for step, differences in enumerate(found):
        older, newer = max(step - max_age, 0), min(max(step - max_age, 0) + 1, step)
        keys = by_sampler(differences)
        assert keys.keys() == {
            (group, *key) for group in (0, 1) for key in {("first", older), ("second", older), ("second", newer)}
        }
        for (group, sampler, version), each in keys.items():
            if group == 1 and sampler == "second" and version >= 2:
                assert each.mean_square > (5e-3 if is_coarse else 1e-4), (step, each)
            elif not (group == 1 and sampler == "second"):
                assert each.mean_square < (2.5e-3 if is_coarse else 1e-9), (step, each)
            assert each.number_format == ("bfloat16" if is_coarse else "float32")


@pytest.mark.parametrize(
    "policy",
    [{}, {"num_updates_per_step": 2}, {"lora_cfg": {"enabled": True, "dim": 3}}],
    ids=["full", "updates", "adapter"],
)
def test_the_step_is_the_same_bit_for_bit(model: Path, policy: dict[str, Any]) -> None:
    results = []
    for checks in (True, False):
        if "lora_cfg" in policy:
            torch.manual_seed(0)
        results.append(checked_steps(model, 3, max_age=1, checks=checks, policy=dict(policy)))
    (_, metrics, parameters), (_, others, unchecked) = results
    assert metrics["loss"] == others["loss"]
    assert metrics["grad_norm"] == others["grad_norm"]
    assert all(torch.equal(parameters[name], unchecked[name]) for name in parameters)


def test_fewer_kept_versions_leave_out_the_others(model: Path) -> None:
    found, _, _ = checked_steps(model, STEPS, max_age=4, logger={"verify_versions": 1})
    compared = {each.version_step for differences in found[5:] for each in differences}
    assert compared == {0, 5} & compared  # version 0 is kept until step 4, then version 5
    none, _, _ = checked_steps(model, 4, max_age=2, logger={"verify_versions": 0})
    assert [{each.version_step for each in differences} for differences in none] == [{0}, {1}, set(), set()]


def test_a_resumed_session_compares_nothing_of_earlier_ones(model: Path) -> None:
    found, _, _ = checked_steps(model, 3, max_age=1, session=SESSION + 1)
    assert found == [[], [], []]


def test_without_new_keys_only_tokens_before_an_update_are_compared() -> None:
    spans = (
        VersionSpan(SESSION, 4, 0, 3, "a"),
        VersionSpan(SESSION, 5, 3, 6, "a"),
        VersionSpan(SESSION, 5, 6, 8, "b"),
        VersionSpan(SESSION, 6, 8, 9, "b"),
    )
    ids, logprobs = np.zeros(9, np.int32), np.zeros(9, np.float32)
    group = Group(1, np.zeros(2, np.int32), (Completion(ids, logprobs, spans, "stop"),))
    assert list(comparable_spans(group, 0, exact=True)) == list(spans)
    assert list(comparable_spans(group, 0, exact=False)) == [spans[0], spans[2]]
    turns = (Turn(0, 0, 3, 0.0), Turn(0, 3, 6, 0.0), Turn(0, 6, 9, 0.0))
    episode = Group(1, group.prompt_ids, group.completions, rows=Rows(1, (0,), turns))
    assert list(comparable_spans(episode, 0, exact=False)) == list(spans[:3])


def test_the_standard_error_is_that_of_completions_where_their_tokens_err_together() -> None:
    together = difference(4, "a", 0, [np.full(10, 0.02), np.full(10, -0.02)], "float32")
    assert together.mean == pytest.approx(0.0)
    assert together.mean_square == pytest.approx(4e-4)
    assert together.tokens == 20
    # Sums ±0.2 of two completions: √(0.08 · 2) / 20.
    assert together.standard_error == pytest.approx(0.02)
    apart = difference(4, "a", 0, [np.array([0.02, -0.02])] * 2, "float32")
    assert apart.standard_error == pytest.approx(0.01)
    assert difference(4, "a", 0, [np.array([30.0, 0.0])], "float32").mean_square == pytest.approx(0.5)

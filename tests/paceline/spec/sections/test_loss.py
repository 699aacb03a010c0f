"""Presets of the loss, and contradictory settings that are refused with the reason."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from paceline.spec import LossSection, RunSpec
from paceline.spec.sections.loss import PRESETS, PresetName


def spec_with(**sections: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "policy": {"model_name": "anywhere", **sections.pop("policy", {})},
            "data": {"train": "prompts.jsonl"},
            "rewards": [{"function": "length"}],
            **sections,
        }
    )


@pytest.mark.parametrize("name", get_args(PresetName))
def test_a_preset_is_whole_and_survives_its_own_resolution(name: str) -> None:
    spec = spec_with(loss_fn={"preset": name})
    for key, value in PRESETS[name].loss_fn.items():  # type: ignore[index]
        assert getattr(spec.loss_fn, key) == value
    for key, value in PRESETS[name].grpo.items():  # type: ignore[index]
        assert getattr(spec.grpo, key) == value
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec


def test_a_users_value_wins_over_the_preset() -> None:
    spec = spec_with(loss_fn={"preset": "dapo", "ratio_clip_max": 0.3}, grpo={"use_dynamic_sampling": False, "seed": 3})
    assert (spec.loss_fn.ratio_clip_max, spec.loss_fn.reduction) == (0.3, "dapo")
    assert (spec.grpo.use_dynamic_sampling, spec.grpo.seed) == (False, 3)


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValidationError, match="'gspo'"):
        LossSection(preset="gpso")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"ratio_anchor": "behaviour"}, ("truncated_importance_sampling_ratio 2.0", "a second time")),
        (
            {
                "ratio_anchor": "behaviour",
                "ratio_level": "sequence",
                "truncated_importance_sampling_ratio": None,
            },
            ("'behaviour'", "'sequence'", "noise"),
        ),
        ({"preset": "gspo", "ratio_anchor": "behaviour"}, ("'behaviour'",)),
        ({"policy_loss": "dppo"}, ("'dppo'", "'proximal'", "ratio_anchor=behaviour")),
        ({"policy_loss": "cispo", "ratio_level": "sequence"}, ("'cispo'", "'sequence'")),
        (
            {"preset": "vespo", "truncated_importance_sampling_type": "sequence_mask"},
            ("'vespo'", "'sequence_mask'"),
        ),
        (
            {"preset": "vespo", "ratio_anchor": "behaviour", "truncated_importance_sampling_ratio": None},
            ("'vespo'", "'behaviour'"),
        ),
        (
            {"preset": "m2po", "ratio_anchor": "proximal", "proximal_policy": "log_linear"},
            ("m2_threshold 0.04", "'log_linear'"),
        ),
        (
            {
                "ratio_anchor": "behaviour",
                "truncated_importance_sampling_ratio": None,
                "proximal_policy": "log_linear",
            },
            ("'behaviour'", "'log_linear'"),
        ),
        ({"ratio_clip_c": 1.1}, ("ratio_clip_c 1.1", "1.2")),
        ({"ratio_clip_c": 3.0, "policy_loss": "sapo"}, ("ratio_clip_c 3.0", "'sapo'")),
        ({"geometric_mask": (1.01, 0.99)}, ("geometric_mask", "(1.01, 0.99)")),
        ({"veto": (2.0, 1.0)}, ("veto", "(2.0, 1.0)")),
        ({"truncated_importance_sampling_ratio_min": 2.0}, ("ratio_min 2.0", "ratio 2.0")),
        (
            {"reference_policy_pool": "reward"},
            ("reference_policy_pool is 'reward'", "reference_policy_kl_penalty 0"),
        ),
        (
            {"truncated_importance_sampling_type": "icepop", "truncated_importance_sampling_ratio": None},
            ("'icepop'", "ratio null"),
        ),
        ({"use_kl_in_reward": True}, ("use_kl_in_reward", "reference_policy_kl_penalty 0")),
        ({"preset": "rloo", "use_kl_in_reward": False}, ("'k1'", "no gradient")),
    ],
)
def test_a_combination_that_means_nothing_is_refused(settings: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError) as caught:
        LossSection(**settings)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"loss_fn": {"proximal_policy": "log_linear"}}, ("'log_linear'", "num_updates_per_step 1")),
        (
            {
                "grpo": {"advantage": "gdpo"},
                "loss_fn": {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.1},
            },
            ("'gdpo'", "use_kl_in_reward"),
        ),
        (
            {"grpo": {"advantage_clip_low": 0.5}},
            ("advantage_clip_low 0.5", "do not include 0"),
        ),
        (
            {"grpo": {"advantage_clip_low": 1, "advantage_clip_high": -1}},
            ("advantage_clip_low 1", "advantage_clip_high -1"),
        ),
    ],
)
def test_sections_that_contradict_each_other(sections: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError) as caught:
        spec_with(**sections)
    for part in parts:
        assert part in str(caught.value)


def test_log_linear_is_for_several_updates() -> None:
    spec = spec_with(loss_fn={"proximal_policy": "log_linear"}, policy={"num_updates_per_step": 2})
    assert spec.loss_fn.proximal_policy == "log_linear"


@pytest.mark.parametrize(
    ("loss_fn", "age", "doubtful"),
    [
        ({}, 8, False),
        ({"truncated_importance_sampling_ratio": None}, 0, False),
        ({"truncated_importance_sampling_ratio": None}, 1, True),
        ({"truncated_importance_sampling_ratio": None, "veto": (1e-4, 100)}, 1, True),
        ({"preset": "dppo"}, 8, False),
        ({"preset": "decoupled_ppo"}, 8, False),
    ],
)
def test_older_samples_without_a_correction_are_doubtful(loss_fn: dict[str, Any], age: int, doubtful: bool) -> None:
    spec = spec_with(loss_fn=loss_fn, async_grpo={"max_trajectory_age_steps": age})
    assert bool(spec.warnings) == doubtful
    for warning in spec.warnings:
        assert f"max_trajectory_age_steps {age}" in warning
        assert "truncated_importance_sampling_ratio" in warning


def test_examples_have_no_age() -> None:
    loss_fn = {"truncated_importance_sampling_ratio": None}
    warnings = spec_with(algorithm="sft", loss_fn=loss_fn).warnings
    assert not [text for text in warnings if "max_trajectory_age_steps" in text]


@pytest.mark.parametrize(
    ("sections", "name", "by_the_pool"),
    [
        ({}, None, False),
        ({"loss_fn": {"reference_policy_kl_penalty": 0.1}}, "anywhere", False),
        (
            {"loss_fn": {"reference_policy_kl_penalty": 0.1, "reference_policy_pool": "reward"}},
            "anywhere",
            True,
        ),
        ({"algorithm": "distillation", "distillation": {"teacher_model_name": "t"}}, "t", False),
        (
            {
                "algorithm": "distillation",
                "distillation": {"teacher_model_name": "t", "teacher_pool": "reward"},
            },
            "t",
            True,
        ),
    ],
)
def test_the_frozen_model_and_its_processes(sections: dict[str, Any], name: str | None, by_the_pool: bool) -> None:
    spec = spec_with(**sections)
    assert (spec.frozen_policy.model_name if spec.frozen_policy else None) == name
    assert spec.pool_serves_reference == by_the_pool


def test_a_divergence_of_whole_distributions_is_refused_with_the_reason() -> None:
    settings = {"teacher_model_name": "t", "kl_type": "jsd"}
    with pytest.raises(ValidationError, match="'jsd' compares whole distributions"):
        spec_with(algorithm="distillation", distillation=settings)

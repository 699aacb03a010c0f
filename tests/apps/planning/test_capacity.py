"""Splits of GPUs, and what they make of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from public_configs import PUBLIC_CONFIGS

from paceline.apps.planning.capacity import Capacity, plan_capacity, splits, work_of
from paceline.apps.planning.processors import PROCESSORS
from paceline.errors import InvalidInput, SpecError
from paceline.models.shape import ModelShape, shape_of
from paceline.spec import RunSpec
from paceline.spec.reading import parse_spec

H100 = PROCESSORS["h100"]


@pytest.fixture
def shape() -> ModelShape:
    made = shape_of(PUBLIC_CONFIGS["meta-llama/Llama-3.1-8B-Instruct"])
    assert made is not None
    return made


def make_spec(max_age: int = 2, **sections: Any) -> RunSpec:
    tree: dict[str, Any] = {
        "policy": {
            "model_name": "m",
            "max_total_sequence_length": 5_120,
            "train_mb_tokens": "auto",
            "activation_checkpointing": "auto",
            "generation": {"backend": "vllm", "max_new_tokens": 4_096},
        },
        "data": {"train": "d.jsonl"},
        "rewards": [{"function": "length"}],
        "grpo": {"num_prompts_per_step": 128, "num_generations_per_prompt": 8},
        "async_grpo": {"max_trajectory_age_steps": max_age},
    }
    return parse_spec(tree | sections)


def test_every_gpu_has_a_place_and_the_longer_part_is_the_step(shape: ModelShape) -> None:
    made = plan_capacity(make_spec(), shape, H100, 64, price=2.0)
    assert made.ranks + made.engines * made.gpus_per_engine <= 64
    assert made.step_s == max(made.generation_s, made.training_s)
    assert made.trained_tokens_per_s == pytest.approx(128 * 8 * 2_048 / made.step_s)
    assert made.cost_per_hour == 128.0
    assert made.cost_per_million_tokens == pytest.approx(128 / 3600 * made.step_s / (128 * 8 * 2_048) * 1e6)
    assert made.groups_per_s == pytest.approx(128 / made.step_s)
    assert 0 < made.age <= 2
    assert made.memory.fits


def test_no_other_split_is_faster(shape: ModelShape) -> None:
    spec = make_spec()
    best = plan_capacity(spec, shape, H100, 16)
    assert {split[0] for split in splits(spec, H100, 16)} == {1, 2, 4, 8}
    assert best.ranks in {2, 4, 8}, "one GPU does not hold the state of 8 B parameters"


def test_more_gpus_are_never_slower(shape: ModelShape) -> None:
    steps = [plan_capacity(make_spec(), shape, H100, number).step_s for number in (8, 16, 32, 64)]
    assert steps == sorted(steps, reverse=True)


def test_on_policy_training_takes_turns(shape: ModelShape) -> None:
    made = plan_capacity(make_spec(max_age=0), shape, H100, 16)
    assert made.step_s == pytest.approx(made.generation_s + made.training_s)
    assert made.age == 0.0
    assert "generation and training take turns" in made.limit


def test_what_fits_nowhere_is_refused_with_the_reason(shape: ModelShape) -> None:
    with pytest.raises(SpecError, match=r"no division of 2 h100 between learner and engines fits: .*"):
        plan_capacity(make_spec(), shape, H100, 2)


def test_a_run_on_examples_is_a_learner_alone(shape: ModelShape) -> None:
    spec = make_spec(algorithm="sft", sft={"max_num_steps": 5, "num_examples_per_step": 64}, rewards=[])
    made = plan_capacity(spec, shape, H100, 8)
    assert (made.ranks, made.engines, made.generation_s) == (8, 0, 0.0)
    assert made.limit.startswith("training")


def test_one_gpu_is_shared() -> None:
    small = shape_of(PUBLIC_CONFIGS["meta-llama/Llama-3.1-8B-Instruct"] | {"num_hidden_layers": 2})
    assert small is not None
    made = plan_capacity(make_spec(), small, H100, 1)
    assert made.is_shared
    assert made.step_s == pytest.approx(made.generation_s + made.training_s)


def test_lengths_are_half_of_what_is_allowed_unless_given() -> None:
    work = work_of(make_spec())
    assert (work.prompt_tokens, work.completion_tokens) == (512.0, 2_048.0)
    assert work_of(make_spec(), 100, 300).sampled_tokens == 128 * 8 * 300
    with pytest.raises(InvalidInput, match=r"do not fit into policy\.max_total_sequence_length 5120"):
        work_of(make_spec(), 100, 5_100)


def test_a_coordinator_that_is_too_slow_is_the_limit(shape: ModelShape) -> None:
    made = plan_capacity(make_spec(), shape, H100, 16)
    busy = replace(made, work=replace(made.work, groups=10**6), step_s=1.0)
    assert isinstance(busy, Capacity)
    assert busy.coordinator_load > 1
    assert busy.limit.startswith("the coordinator: 1,000,000 groups/s")

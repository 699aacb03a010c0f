"""Operations, bytes and seconds by numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from paceline.apps.planning.processors import (
    Rates,
    Work,
    active_parameters,
    generation_seconds,
    generation_terms,
    training_seconds,
    training_terms,
)
from paceline.models.shape import ModelShape, shape_of

WORK = Work(groups=4, completions=8, prompt_tokens=10.0, completion_tokens=20.0, micro_batch_tokens=100)


@pytest.fixture
def shape() -> ModelShape:
    """Two layers, 8 wide: attention 8, keys 4, MLP 16, 32 tokens."""
    config = {
        "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 16, "vocab_size": 32, "tie_word_embeddings": True,
    }  # fmt: skip
    made = shape_of(config)
    assert made is not None
    return made


def test_the_weights_that_a_token_passes_through(shape: ModelShape) -> None:
    layer = 2 * 8 * (8 + 4) + 3 * 8 * 16
    assert active_parameters(shape) == 2 * layer + 32 * 8


def test_generation_counts_weights_once_a_step_and_prompts_once_a_group(shape: ModelShape) -> None:
    terms = generation_terms(shape, WORK, slots=16, width=2)
    active, sampled = active_parameters(shape), 4 * 8 * 20
    steps = sampled / 16
    context = 10 + 20 / 2
    prefill = 4 * 10 * 2 * (active - 256)
    assert terms["flops"] == pytest.approx(sampled * (2 * active + 4 * 8 * 2 * context) + prefill)
    read = min(shape.parameters, active * 16)
    assert terms["bytes"] == pytest.approx(2 * (steps * read + sampled * context * 2 * 2 * 4))
    assert terms["layer_steps"] == steps * 2
    assert terms["logits"] == sampled * 32


def test_more_room_than_sequences_is_not_used(shape: ModelShape) -> None:
    assert generation_terms(shape, WORK, slots=1e6) == generation_terms(shape, WORK, slots=32)


def test_a_mixture_reads_all_experts_when_many_sequences_choose(shape: ModelShape) -> None:
    dense = active_parameters(shape)
    mixture = ModelShape(**{**vars(shape), "parameters": int(5 * dense), "experts_per_token": 2})
    few, many = generation_terms(mixture, WORK, 1, 1), generation_terms(mixture, WORK, 32, 1)
    keys = 640 * 20 * 2 * 2 * 4
    assert few["bytes"] - keys == pytest.approx(640 * dense)
    assert many["bytes"] - keys == pytest.approx(20 * 5 * dense, rel=1e-3)


def test_training_counts_forward_backward_and_what_is_recomputed(shape: ModelShape) -> None:
    terms = training_terms(shape, WORK)
    layer = 2 * 8 * (8 + 4) + 3 * 8 * 16
    flops = 32 * 2 * (6 * layer * 30 + 6 * 8 * 30 * 30) + 6 * 256 * 640
    assert terms["flops"] == pytest.approx(flops)
    assert terms["layer_batches"] == 2 * math.ceil(32 * 30 / 100)
    recomputed = Work(4, 8, 10.0, 20.0, 100, recomputed=1.0)
    assert training_terms(shape, recomputed)["flops"] == pytest.approx(flops * 4 / 3)


def test_the_slower_roof_counts_and_overheads_are_added(shape: ModelShape) -> None:
    terms = {"flops": 100.0, "bytes": 100.0, "tokens": 7.0}
    assert Rates(10.0, 50.0).seconds(terms) == 10.0
    assert Rates(100.0, 20.0, {"tokens": 0.5}).seconds(terms) == 5.0 + 3.5
    rates = Rates(1e6, each_s={"layer_batches": 1.0, "parameters": 0.0})
    assert training_seconds(shape, WORK, rates) > 20.0
    slow_memory = Rates(1e12, 1e6)
    alone, together = (generation_seconds(shape, WORK, slow_memory, slots) for slots in (1, 32))
    assert alone > 2 * together, "the weights are read once a step"

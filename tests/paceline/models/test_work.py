"""FLOPs of a step against counts by hand, and against torch's own counter."""

from __future__ import annotations

import pytest
import torch
from model_shapes import HALF_BILLION, LAYER
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from paceline.models.shape import peak_flops, shape_of, training_flops

SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def test_weights_take_six_operations_a_token() -> None:
    shape = shape_of(HALF_BILLION)
    assert shape is not None
    products = LAYER - 2 * 896  # without the norms
    expected = 6 * (24 * products * 1000 + 151_936 * 896 * 600) + 24 * 10 * 6 * 896 * 100 * 100
    assert training_flops(shape, [(10, 100)], 600) == expected
    adapter = training_flops(shape, [(10, 100)], 600, frozen_base=True)
    assert 0.66 < adapter / expected < 0.68


def test_the_count_is_that_of_torch() -> None:
    shape = shape_of(SMALL)
    assert shape is not None
    model = Qwen2ForCausalLM(Qwen2Config(**SMALL, attn_implementation="eager"))
    ids = torch.arange(48).view(1, 48)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.sum().backward()
    # torch counts the masked half of the attention matrices too
    attention = 3 * 6 * 64 * 48 * 48
    assert counter.get_total_flops() == pytest.approx(training_flops(shape, [(1, 48)], 48) + attention, rel=0.02)


def test_a_gpu_has_the_figure_of_its_kind() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("some GPU") is None

"""The float32 head: logits of bfloat16 weights that are not rounded, also after new weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_qwen3
from tiny_policy import make_spec, save_tiny_policy

from paceline.rollout.native.kv_cache import SlotCache
from paceline.rollout.native.model import Float32Head, load_native_model


def prefilled(model: Any, ids_RT: torch.Tensor) -> torch.Tensor:
    cache = SlotCache(len(ids_RT))
    cache.begin_prefill(slice(len(ids_RT)), ids_RT.shape[1])
    with torch.inference_mode():
        return model.prefill(ids_RT, torch.full((len(ids_RT),), ids_RT.shape[1]), cache)  # type: ignore[no-any-return]


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_summed_in_float32_from_the_weights_of_the_moment(tmp_path: Path, tied: bool) -> None:
    settings = {"generation_precision": "bfloat16", "float32_head": True}
    policy = make_spec(save_tiny_policy(tmp_path, tied=tied), **settings).policy
    model = load_native_model(policy, "cpu", load_weights=True)
    hidden: list[torch.Tensor] = []
    model.module.base_model.register_forward_hook(lambda _m, _i, out: hidden.append(out.last_hidden_state))
    ids_RT = torch.arange(10).reshape(2, 5)
    for seed in (0, 1):
        if seed:
            model.replace(tiny_qwen3(seed=seed, tie_word_embeddings=tied).state_dict())
        logits_RV = prefilled(model, ids_RT)
        head_VH = model.module.get_output_embeddings().weight
        assert (logits_RV.dtype, head_VH.dtype) == (torch.float32, torch.bfloat16)
        expected_RV = hidden[-1][:, -1].float() @ head_VH.float().T
        torch.testing.assert_close(logits_RV, expected_RV, atol=1e-6, rtol=1e-6)
        assert (expected_RV - expected_RV.bfloat16()).abs().max() > 1e-4, "rounded logits would be others"


def test_a_bias_is_added_and_a_float32_head_stays_as_it_is() -> None:
    head = torch.nn.Linear(4, 3).bfloat16().requires_grad_(False)
    Float32Head(head)
    hidden = torch.randn(2, 4).bfloat16()
    expected = hidden.float() @ head.weight.float().T + head.bias.float()
    torch.testing.assert_close(head(hidden), expected)
    plain = torch.nn.Linear(4, 3)
    Float32Head(plain)
    assert "forward" not in vars(plain)

"""The native engine with every kind of layer, while sequences join, leave and get new weights: its logits are those of a
forward pass of transformers over each sequence alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_zoo import EXPERTS, WINDOW, Architecture
from tiny_policy import make_spec
from torch import Tensor
from transformers import DeepseekV32Config, RwkvConfig

from paceline.errors import InvalidInput
from paceline.groups import Completion, Version
from paceline.rollout.engine import GenerationRequest, SamplingParams
from paceline.rollout.native import model as native
from paceline.rollout.native.batch import DecodeBatch, RunningSequence
from paceline.rollout.native.model import NativeModel, load_native_model

MAX_TOKENS = 48
SAMPLED = 20
STATES = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 3,
    "head_dim": 8,
}
MAMBA_2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
}
ROUTED = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, **EXPERTS}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW, "head_dim": 8}
SHARED = {
    **WINDOWS,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": WINDOWS["layer_types"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 23,
    "final_logit_softcapping": 3.0,
}
LOCAL = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}


def architecture(name: str, config: dict[str, Any] | None = None, config_name: str = "") -> Architecture:
    return Architecture(name, name, config or {}, config_name=config_name)


QUICK = (
    architecture("Qwen3Next", {**STATES, "num_experts": 4, "shared_expert_intermediate_size": 24, **EXPERTS}),
    architecture(
        "FalconH1",
        {
            **MAMBA_2,
            "mamba_d_ssm": 64,
            "head_dim": 8,
            "time_step_limit": (0.5, 0.9),
            "ssm_multipliers": [0.5, 1.5, 1.2, 0.8, 0.7],
            "lm_head_multiplier": 0.5,
        },
    ),
    architecture("Mamba", {"state_size": 8, "conv_kernel": 3, "time_step_rank": 4}),
    architecture(
        "RecurrentGemma",
        {"block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": 8, "head_dim": 8},
    ),
    architecture("MiniMax", {**LOCAL, "layer_types": STATES["layer_types"], "block_size": 4, "sliding_window": WINDOW}),
    architecture("DeepseekV3", {**LATENT, **ROUTED}),
    architecture(
        "Llama4",
        {
            **LOCAL,
            "num_experts_per_tok": 1,
            "layer_types": ["chunked_attention", "full_attention"],
            "attention_chunk_size": 4,
            "intermediate_size_mlp": 48,
            "no_rope_layers": [1, 0],
            "floor_scale": 4,
            "attn_scale": 0.5,
        },
        "Llama4TextConfig",
    ),
    architecture("Gemma4", {**SHARED, "global_head_dim": 16}, "Gemma4TextConfig"),
)
SLOW = (
    architecture("Qwen3_5", STATES, "Qwen3_5TextConfig"),
    architecture(
        "Qwen3_5Moe",
        {**STATES, "num_experts": 4, "shared_expert_intermediate_size": 24, **EXPERTS},
        "Qwen3_5MoeTextConfig",
    ),
    architecture("OlmoHybrid", STATES),
    architecture(
        "KimiLinear",
        {
            **LATENT,
            "layer_types": STATES["layer_types"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "linear_conv_kernel_dim": 3,
        },
    ),
    architecture(
        "NemotronH",
        {
            "layers_block_type": ["mamba", "attention", "mlp"],
            "num_hidden_layers": 3,
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "conv_kernel": 3,
            "chunk_size": 8,
            "time_step_min": 0.1,
        },
    ),
    architecture(
        "GraniteMoeHybrid",
        {
            **MAMBA_2,
            "layer_types": ["mamba", "attention"],
            "mamba_d_conv": 3,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
        },
    ),
    architecture("Bamba", {**MAMBA_2, "attn_layer_indices": [1]}),
    architecture(
        "Jamba",
        {
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    architecture("Lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    architecture(
        "Lfm2Moe",
        {"layer_types": ["conv", "full_attention"], "num_experts": 4, "num_dense_layers": 1, **EXPERTS},
    ),
    architecture(
        "Zamba2",
        {
            "layers_block_type": ["mamba", "hybrid"],
            "hybrid_layer_ids": [1],
            "mamba_ngroups": 1,
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "chunk_size": 8,
            "num_mem_blocks": 1,
            "use_mem_rope": True,
            "time_step_min": 0.1,
        },
    ),
    architecture(
        "Mamba2", {"state_size": 8, "conv_kernel": 3, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8}
    ),
    architecture("FalconMamba", {"state_size": 8, "conv_kernel": 3, "time_step_rank": 4}),
    architecture("DeepseekV2", {**LATENT, **ROUTED, "topk_method": "group_limited_greedy"}),
    architecture("Glm4MoeLite", {**LATENT, **ROUTED}),
    architecture("MiniCPM3", LATENT),
    architecture("Youtu", LATENT),
    architecture(
        "Gemma2",
        {**WINDOWS, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    architecture(
        "Gemma3n",
        {
            **SHARED,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        },
        "Gemma3nTextConfig",
    ),
    architecture("Cohere2", {**WINDOWS, "logit_scale": 0.5}),
    architecture("Granite", {"logits_scaling": 2.0}),
    architecture("SmolLM3"),
    architecture("Exaone4", WINDOWS),
    architecture("Apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}),
    architecture("Ernie4_5", {"head_dim": 8}),
    architecture("HunYuanDenseV1", {"head_dim": 8}),
    architecture("MiniMaxM2", LOCAL),
)


class Recorder(DecodeBatch):
    """A batch that keeps the logits from which each sequence was sampled."""

    def __init__(self, model: NativeModel) -> None:
        super().__init__(model, 8)
        self.logits_TV: dict[RunningSequence, list[Tensor]] = {}
        self.ended: list[tuple[RunningSequence, Completion]] = []

    def join(self, *prompts: tuple[np.ndarray, int]) -> None:
        """Add a sequence for each prompt and number of tokens to sample."""
        sequences = []
        for prompt, num_tokens in prompts:
            seed = len(self.logits_TV) + len(sequences)
            request = GenerationRequest(f"{seed}", prompt, SamplingParams(num_tokens), seed)
            sequences.append(RunningSequence(request, frozenset(), len(prompt) + num_tokens))
        self.ended += self.add(sequences)

    def run(self, most_steps: int) -> None:
        for _ in range(most_steps):
            if self.sequences:
                self.ended += self.step()

    def _append(self, logits_RV: Tensor, first: int, end: int) -> None:
        for sequence, logits_V in zip(self.sequences[first:end], logits_RV, strict=True):
            self.logits_TV.setdefault(sequence, []).append(logits_V.clone())
        super()._append(logits_RV, first, end)


def load(config: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> NativeModel:
    """Return the engine's model for `config`, without weights."""
    config.save_pretrained(folder)
    monkeypatch.setattr(native, "check_architecture", lambda *_: None)
    spec = make_spec(folder, max_total_sequence_length=MAX_TOKENS, generation={"max_new_tokens": 8})
    return load_native_model(spec.policy, "cpu", load_weights=False)


@pytest.mark.parametrize(
    "architecture",
    [*QUICK, *(pytest.param(each, marks=[pytest.mark.slow, pytest.mark.merge]) for each in SLOW)],
    ids=lambda each: each.family,
)
@torch.inference_mode()
def test_logits_are_those_of_each_sequence_alone(
    architecture: Architecture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With larger weights, rounding one of them changes some models' logits by more than 1e-5.
    architecture = replace(architecture, config={"initializer_range": 0.1, **architecture.config})
    old, new = architecture.make(), architecture.make()
    for parameter in new.parameters():
        parameter.mul_(1 + 0.2 * torch.randn(parameter.shape))
    model = load(old.config, tmp_path, monkeypatch)
    model.check(old.state_dict())
    model.replace(old.state_dict())
    rng = np.random.default_rng(0)
    a, b, c, d = (rng.integers(0, 23, size).astype(np.int32) for size in (9, 4, 1, 9))
    batch = Recorder(model)
    batch.change_version(Version(1, 0), None)
    batch.join((a, 3), (b, SAMPLED), (a, SAMPLED + 4), (c, 6), (b, SAMPLED + 1), (d, 7))
    batch.run(4)
    batch.join((a[::-1].copy(), 7), (a, SAMPLED))  # the results for `a` are cached
    batch.run(6)
    model.replace(new.state_dict())
    batch.change_version(Version(1, 1), 1)
    batch.join((d, SAMPLED))
    batch.run(MAX_TOKENS)
    assert len(batch.ended) == 9
    for sequence, completion in batch.ended:
        ids = np.concatenate((sequence.request.prompt_ids, completion.token_ids)).astype(np.int64)
        found_TV = torch.stack(batch.logits_TV[sequence])
        for span in completion.spans:
            plain = new if span.step else old
            logits_LV = plain(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0]
            expected_TV = logits_LV[sequence.prompt_length - 1 : -1]
            at = slice(span.start, span.end)
            torch.testing.assert_close(found_TV[at], expected_TV[at], atol=1e-5, rtol=1e-5)
    check_scores(model, new)


def check_scores(model: NativeModel, plain: Any) -> None:
    """Compare the log-probabilities of given texts, one of which is padded."""
    texts_RT = torch.randint(23, (2, 17), generator=torch.Generator().manual_seed(3))
    logprobs_RT, top_ids_RT, tops_RT = model.score(texts_RT)
    for row, length in ((0, 17), (1, 11)):
        text_T = texts_RT[row, :length]
        expected_TV = plain(input_ids=text_T[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        chosen_T = expected_TV.gather(-1, text_T[1:, None])[:, 0]
        torch.testing.assert_close(logprobs_RT[row, 1:length], chosen_T, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(tops_RT[row, 1:length], expected_TV.max(-1).values, atol=1e-5, rtol=1e-5)
        assert torch.equal(top_ids_RT[row, 1:length], expected_TV.argmax(-1))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (DeepseekV32Config(num_hidden_layers=1), "has layers of the kind indexed_attention; use the vllm backend"),
        (RwkvConfig(num_hidden_layers=1), "keeps states in a form that it does not know; use the vllm backend"),
    ],
)
def test_what_it_cannot_compute_is_refused_by_name(
    config: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidInput, match=f"cannot run a {config.model_type}, which {reason}"):
        load(config, tmp_path, monkeypatch)


def test_a_transformers_without_states_in_its_cache_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "Cache", object)
    with pytest.raises(InvalidInput, match=r"qwen3_next, which has states, .*; use transformers 5\.23"):
        load(QUICK[0].make().config, tmp_path, monkeypatch)

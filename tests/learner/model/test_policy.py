"""The packed policy against the plain transformers model, sequence by sequence, in value and gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tiny_policy import CPU, make_batch, make_spec, save_tiny_policy
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from paceline.errors import InvalidInput
from paceline.learner.batch.samples import SequenceLayout, pack_samples
from paceline.learner.model.attention import packed_attention
from paceline.learner.model.policy import (
    load_policy,
    load_reference,
    packed_logprobs,
    use_onednn_linear,
    use_short_norms,
)
from paceline.models.logits import LogitRule, logit_rule

SMALL = {
    "vocab_size": 23,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def save_llama(folder: Path) -> Path:
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(folder)
    return folder


def save_qwen2_with_biases(folder: Path) -> Path:
    Qwen2ForCausalLM(Qwen2Config(**SMALL)).save_pretrained(folder)
    return folder


def save_mistral_with_window(folder: Path) -> Path:
    MistralForCausalLM(MistralConfig(**SMALL, sliding_window=5)).save_pretrained(folder)
    return folder


def save_untied(folder: Path) -> Path:
    return save_tiny_policy(folder, tied=False)


def unpacked_loss(model: torch.nn.Module, weights: list[Tensor], temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and Σ weight · logprob, one sequence at a time."""
    logprobs, entropies = [], []
    for sequence in trained():
        ids = torch.from_numpy(np.concatenate((sequence.prompt_ids, sequence.completion_ids)).astype(np.int64))
        logp_RV = (model(ids[None]).logits[0] / temperature).log_softmax(-1)[len(sequence.prompt_ids) - 1 : -1]
        logprobs.append(logp_RV.gather(-1, ids[len(sequence.prompt_ids) :, None])[:, 0])
        entropies.append(-(logp_RV.exp() * logp_RV).sum(-1))
    total = sum((lp * w).sum() for lp, w in zip(logprobs, weights, strict=True))
    assert isinstance(total, Tensor)
    return torch.cat(logprobs), torch.cat(entropies), total


def trained() -> list[Any]:
    return sorted((s for s in make_batch() if len(s.completion_ids)), key=lambda s: -s.num_row_tokens)


@pytest.mark.parametrize(
    "save", [save_tiny_policy, save_untied, save_llama, save_qwen2_with_biases, save_mistral_with_window]
)
def test_packed_equals_plain(save: Any, tmp_path: Path) -> None:
    torch.manual_seed(3)
    folder = save(tmp_path)
    weights = [torch.randn(len(s.completion_ids)) for s in trained()]
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    expected_N, expected_entropy_N, total = unpacked_loss(plain, weights, 0.7)
    total.backward()

    policy = load_policy(make_spec(folder).policy, CPU)
    logprobs_N, entropy_N = packed_logprobs(policy, pack_samples(trained(), CPU), temperature=0.7, chunk_tokens=7)
    (logprobs_N * torch.cat(weights)).sum().backward()

    torch.testing.assert_close(logprobs_N, expected_N, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy_N, expected_entropy_N, atol=1e-5, rtol=1e-5)
    expected_grads = {name: p.grad for name, p in plain.named_parameters()}
    assert expected_grads.keys() == dict(policy.named_parameters()).keys()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(parameter.grad, expected_grads[name], atol=2e-5, rtol=1e-4)


def test_a_float32_head_takes_what_the_forward_computed_in_bfloat16(tmp_path: Path) -> None:
    folder, packed = save_tiny_policy(tmp_path), pack_samples(trained(), CPU)
    model = load_policy(make_spec(folder, precision="bfloat16", float32_head=True).policy, CPU)
    found: list[Tensor] = []
    model.base_model.register_forward_hook(lambda _m, _i, out: found.append(out.last_hidden_state))
    logprobs_N, _ = packed_logprobs(model, packed, temperature=0.7, chunk_tokens=7)
    head_VH = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).lm_head.weight
    hidden_NH = found[0][0, packed.predictors_N]
    assert hidden_NH.dtype == torch.bfloat16
    logp_NV = (hidden_NH.float() @ head_VH.float().T / 0.7).log_softmax(-1)
    expected_N = logp_NV.gather(-1, packed.targets_N[:, None])[:, 0]
    torch.testing.assert_close(logprobs_N, expected_N, atol=1e-5, rtol=1e-5)
    rounded_NV = ((hidden_NH @ head_VH.T).float() / 0.7).log_softmax(-1)
    assert (rounded_NV.gather(-1, packed.targets_N[:, None])[:, 0] - expected_N).abs().max() > 1e-3


def test_names_and_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(save_tiny_policy(tmp_path), dtype=torch.float32)
    policy = load_policy(make_spec(tmp_path, activation_checkpointing=True).policy, CPU)
    assert policy.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in policy.state_dict().items())
    assert policy.get_output_embeddings().weight is policy.get_input_embeddings().weight


def test_the_reference_takes_no_gradient(tmp_path: Path) -> None:
    reference = load_reference(make_spec(save_tiny_policy(tmp_path)).policy, CPU)
    assert not any(p.requires_grad for p in reference.parameters())
    assert not packed_logprobs(reference, pack_samples(trained(), CPU), temperature=1.0, chunk_tokens=7)[
        0
    ].requires_grad


def test_runs_of_equal_length() -> None:
    layout = SequenceLayout.of([5, 5, 3, 2, 2, 2], CPU)
    assert layout.runs == ((2, 5), (1, 3), (3, 2))
    assert layout.starts.tolist() == [0, 5, 10, 13, 15, 17, 19]
    assert layout.starts.dtype == torch.int32
    assert layout.max_length == 5


def test_attention_that_it_cannot_compute_is_refused() -> None:
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match="position_bias"):
        packed_attention(torch.nn.Identity(), q, q, q, None, layout=SequenceLayout.of([3], CPU), position_bias=q)


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "no-such-owner-xyz/no-such-model"])
def test_a_model_that_is_not_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidInput, match=r"policy\.model_name"):
        load_policy(make_spec(Path("x")).policy.model_copy(update={"model_name": name}), CPU)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=7.5), LogitRule(1.0, 7.5)),
        (GraniteConfig(**SMALL, logits_scaling=3.0), LogitRule(1 / 3.0, None)),
        (Cohere2Config(**SMALL, logit_scale=0.0625), LogitRule(0.0625, None)),
        (Qwen3Config(**SMALL), LogitRule(1.0, None)),
    ],
)
def test_the_rule_of_logits_is_found(config: Any, expected: LogitRule) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert logit_rule(model, "the model") == expected


def test_logits_by_an_unknown_rule_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Qwen3ForCausalLM.forward

    def squared(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        output.logits = output.logits.square()
        return output

    Qwen3ForCausalLM(Qwen3Config(**SMALL)).save_pretrained(tmp_path)
    monkeypatch.setattr(Qwen3ForCausalLM, "forward", squared)
    with pytest.raises(InvalidInput, match="Qwen3ForCausalLM do not follow from its LM head by a known rule"):
        load_policy(make_spec(tmp_path).policy, CPU)


@pytest.mark.parametrize("bias", [True, False])
def test_onednn_linear_is_the_same_product(bias: bool) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(5, 7, bias=bias)
    other = torch.nn.Linear(5, 7, bias=bias)
    other.load_state_dict(plain.state_dict())
    use_onednn_linear(other, CPU, torch.float32)
    inputs = torch.randn(2, 3, 5, requires_grad=True)
    slopes = torch.randn(2, 3, 7)
    expected, got = (
        (out, torch.autograd.grad((out * slopes).sum(), (inputs, *module.parameters())))
        for module in (plain, other)
        for out in [module(inputs)]
    )
    torch.testing.assert_close(got, expected)


def test_onednn_linear_takes_what_was_cast_after_loading() -> None:
    """Few CPUs have oneDNN's kernels for bfloat16."""
    linear = torch.nn.Linear(5, 7)
    use_onednn_linear(linear, CPU, torch.float32)
    linear.bfloat16()
    inputs = torch.randn(3, 5, dtype=torch.bfloat16)
    with patch(
        "paceline.learner.model.policy.product",
        side_effect=RuntimeError("could not create a primitive descriptor"),
    ):
        assert torch.equal(linear(inputs), torch.nn.functional.linear(inputs, linear.weight, linear.bias))


def test_linear_layers_stay_as_they_are_in_other_types() -> None:
    linear = torch.nn.Linear(5, 7)
    use_onednn_linear(linear, CPU, torch.bfloat16)
    assert "forward" not in vars(linear)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_short_norms_change_no_bit_of_a_gradient(kind: str) -> None:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**SMALL)) if kind == "llama" else Qwen3ForCausalLM(Qwen3Config(**SMALL))
    ids = torch.randint(SMALL["vocab_size"], (2, 9))
    runs = []
    for _ in range(2):
        logits = model(input_ids=ids, use_cache=False).logits
        runs.append((logits, *torch.autograd.grad(logits.log_softmax(-1)[..., 0].sum(), list(model.parameters()))))
        use_short_norms(model, CPU)
    assert vars(model.model.norm)["forward"]
    assert all(torch.equal(before, after) for before, after in zip(*runs, strict=True))


def test_norms_of_other_formulas_stay_as_they_are() -> None:
    model: Any = Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8))
    use_short_norms(model, CPU)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_damaged_file_of_weights_is_the_models_fault(tmp_path: Path) -> None:
    folder = save_llama(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InvalidInput, match=r"policy\.model_name '.*model\.safetensors is damaged: ") as found:
        load_policy(make_spec(folder).policy, CPU)
    assert type(found.value) is InvalidInput
    assert "\n" not in str(found.value)

"""Loading against transformers' `from_pretrained`: the same bits for every parameter and buffer; files that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
import torch
from loaded_models import differing, save_model
from safetensors.torch import load_file, save_file
from tiny_policy import CPU, make_spec, save_tiny_policy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSequenceClassification, GPTNeoXConfig, GPTNeoXForCausalLM

from paceline.errors import InvalidInput
from paceline.learner.model.loading import _Placing
from paceline.learner.model.policy import load_policy, load_reference, load_reward_model

LORA = {"enabled": True, "dim": 2, "alpha": 4}


@pytest.mark.parametrize("kind", ["tied", "untied", "moe", "bias", "scaled", "stretched"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_every_bit_is_that_of_from_pretrained(kind: str, precision: str, tmp_path: Path) -> None:
    """In bfloat16 the model is sharded, over one rank."""
    policy = make_spec(save_model(kind, tmp_path), precision=precision).policy
    loaded = load_policy(policy, CPU)
    assert differing(loaded, tmp_path, torch.float32) == []
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    frozen = load_reference(policy, CPU)
    assert differing(frozen, tmp_path, getattr(torch, precision)) == []
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert tied == loaded.config.tie_word_embeddings


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_adapters_base_keeps_the_type_of_its_files(precision: str, tmp_path: Path) -> None:
    policy = make_spec(save_model("tied", tmp_path), precision=precision, lora_cfg=LORA).policy
    loaded = load_policy(policy, CPU)
    assert differing(loaded, tmp_path, getattr(torch, precision)) == []
    trained = {name: p for name, p in loaded.named_parameters() if p.requires_grad}
    assert trained
    assert all(".lora_" in name and p.dtype == torch.float32 for name, p in trained.items())
    assert any(p.abs().sum() > 0 for name, p in trained.items() if ".lora_A." in name)


def test_a_base_in_float32_files_loses_nothing(tmp_path: Path) -> None:
    policy = make_spec(save_tiny_policy(tmp_path), precision="bfloat16", lora_cfg=LORA).policy
    assert differing(load_policy(policy, CPU), tmp_path, torch.float32) == []


def test_a_head_that_is_not_there_is_drawn_as_transformers_draws_it(tmp_path: Path) -> None:
    policy = make_spec(save_model("tied", tmp_path), "rm").policy
    torch.manual_seed(3)
    loaded = load_reward_model(policy, CPU)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    auto: Any = AutoModelForSequenceClassification
    expected = auto.from_pretrained(tmp_path, dtype=torch.float32, num_labels=1)
    assert torch.equal(loaded.score.weight, expected.score.weight)
    assert torch.equal(after, torch.get_rng_state())


def test_a_reward_model_begins_without_the_lm_head_of_gpt_neox(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=32, pad_token_id=0, **sizes))
    model.save_pretrained(tmp_path)
    loaded = load_reward_model(make_spec(tmp_path, "rm").policy, CPU)
    assert torch.equal(loaded.gpt_neox.embed_in.weight, model.gpt_neox.embed_in.weight)


def test_a_model_that_claims_a_head_keeps_it(tmp_path: Path) -> None:
    config = save_model("tied", tmp_path) / "config.json"
    claims = {"architectures": ["Qwen3ForSequenceClassification"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | claims))
    with pytest.raises(InvalidInput, match=r"lacks tensor 'score\.weight'"):
        load_reward_model(make_spec(tmp_path, "rm").policy, CPU)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    file = save_tiny_policy(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match=r"model\.safetensors lacks tensor 'model\.layers\.1\.mlp\.up_proj"):
        load_policy(make_spec(tmp_path).policy, CPU)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    config = save_tiny_policy(tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 40}))
    with pytest.raises(InvalidInput, match=r"layers\.0\.mlp\.down_proj\.weight' in .*shape \(32, 48\).*\(32, 40\)"):
        load_policy(make_spec(tmp_path).policy, CPU)


def test_tied_tensors_that_differ_are_refused(tmp_path: Path) -> None:
    file = save_tiny_policy(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match=r"different values .*tie_word_embeddings"):
        load_policy(make_spec(tmp_path).policy, CPU)


def test_a_model_at_a_url_is_read_by_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = save_model("moe", tmp_path / "model")
    url = f"memory://{uuid4().hex}/model"
    fsspec.filesystem("memory").put(str(folder), url, recursive=True)
    loaded = load_policy(make_spec(tmp_path).policy.model_copy(update={"model_name": url}), CPU)
    assert differing(loaded, folder, torch.float32) == []
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_divided_parameter_goes_where_it_shall_stay(tmp_path: Path) -> None:
    """`DTensor.from_local` creates it on the device of its mesh; policy.cpu_offload keeps it in the host's memory."""
    save_tiny_policy(tmp_path)
    model = load_policy(make_spec(tmp_path, precision="bfloat16").policy, CPU)
    name, divided = next(iter(model.named_parameters()))
    path, _, own = name.rpartition(".")
    assert isinstance(divided, DTensor)
    placing = _Placing(model.get_submodule(path), torch.device("meta"))
    setattr(placing, own, torch.nn.Parameter(divided.detach(), requires_grad=False))
    placed = model.get_parameter(name)
    assert isinstance(placed, DTensor)
    assert placed.device.type == "meta"
    assert placed.device_mesh == divided.device_mesh
    assert not placed.requires_grad

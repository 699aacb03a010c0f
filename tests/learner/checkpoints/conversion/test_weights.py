"""An adapter is merged as peft merges it, or its setting is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded_models import save_model
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from paceline.errors import InvalidInput
from paceline.learner.checkpoints.conversion.folders import to_folder

AUTO: Any = AutoModelForCausalLM
TOKENS = torch.arange(20)[None]
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("default::UserWarning"),
]

RIGHT: dict[str, dict[str, Any]] = {
    "plain": {},
    "random B": {"init_lora_weights": False},
    "gaussian": {"init_lora_weights": "gaussian"},
    "rank-stabilized": {"use_rslora": True},
    "dropout": {"lora_dropout": 0.3},
    "one layer": {"layers_to_transform": [1]},
    "one layer by pattern": {"layers_to_transform": 0, "layers_pattern": "layers"},
    "regular expression": {"target_modules": r".*\.1\.mlp\.(up|down)_proj"},
    "all linear layers": {"target_modules": "all-linear", "exclude_modules": ["k_proj"]},
}
CHANGED_BASE = ["pissa", "pissa_niter_4", "olora"]
"""Initializations of peft that change the base. See huggingface/peft#1929 and #2184."""

REFUSED: dict[str, Any] = {
    "init_lora_weights": "corda",
    "init_lora_weights ": "loftq",
    "init_lora_weights  ": "lora_ga",
    "init_lora_weights   ": "eva",
    "init_lora_weights    ": "orthogonal",
    "init_lora_weights     ": "something of a later version",
    "init_lora_weights      ": None,
    "peft_type": "LOHA",
    "peft_type ": None,
    "bias": "lora_only",
    "use_dora": True,
    "lora_bias": True,
    "fan_in_fan_out": True,
    "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {"q_proj": 4},
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [1, 2],
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "layer_replication": [[0, 2], [1, 2]],
    "megatron_config": {"tensor_model_parallel_size": 2},
    "use_qalora": True,
    "alora_invocation_tokens": [1],
    "loftq_config": {"loftq_bits": 4},
    "eva_config": {"rho": 2.0},
    "corda_config": {"corda_method": "ipm"},
    "arrow_config": {"top_k": 2},
    "kasa_config": {"beta": 1e-4},
    "monteclora_config": {"num_samples": 2},
    "use_bdlora": {"nblocks": 2},
    "velora_config": {"num_groups": 2},
    "ensure_weight_tying": True,
    "a_setting_of_a_later_version": 0.5,
}


def save_adapter(base: Path, folder: Path, **settings: Any) -> Any:
    """Write an adapter with three steps' worth of changes, and return its model."""
    torch.manual_seed(1)
    model = AUTO.from_pretrained(base, dtype=torch.float32)
    adapted: Any = get_peft_model(
        model, LoraConfig(**{"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]} | settings)
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter += 0.1 * torch.randn_like(parameter)
    adapted.save_pretrained(str(folder))
    return adapted.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_model("untied", folder)
    return folder


@pytest.mark.parametrize("name", RIGHT)
def test_settings_that_are_merged_are_merged_as_peft_does(name: str, base: Path, tmp_path: Path) -> None:
    save_adapter(base, tmp_path / "adapter", **RIGHT[name])
    to_folder(str(base), tmp_path / "out", dtype=torch.float32, adapter=tmp_path / "adapter")
    plain = AUTO.from_pretrained(base, dtype=torch.float32)
    first = logits(plain)
    reloaded = PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).merge_and_unload()
    found = logits(AUTO.from_pretrained(tmp_path / "out", dtype=torch.float32))
    torch.testing.assert_close(found, logits(reloaded), rtol=0, atol=1e-4)
    assert (found - first).abs().max() > 0.01


@pytest.mark.parametrize("init", CHANGED_BASE)
def test_an_adapter_that_changed_its_base_is_refused(init: str, base: Path, tmp_path: Path) -> None:
    save_adapter(base, tmp_path / "adapter", init_lora_weights=init)
    with pytest.raises(InvalidInput, match=f"init_lora_weights is '{init}', which paceline does not merge"):
        to_folder(str(base), tmp_path / "out", adapter=tmp_path / "adapter")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "value"), REFUSED.items(), ids=lambda part: str(part))
def test_a_setting_is_refused_by_name(name: str, value: Any, base: Path, tmp_path: Path, plain_adapter: Path) -> None:
    file = plain_adapter / "adapter_config.json"
    whole = file.read_text()
    file.write_text(json.dumps(json.loads(whole) | {name.strip(): value}))
    try:
        with pytest.raises(InvalidInput, match=f"{name.strip()} is .*, which paceline does not merge"):
            to_folder(str(base), tmp_path / "out", adapter=plain_adapter)
    finally:
        file.write_text(whole)


@pytest.fixture(scope="module")
def plain_adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    save_adapter(base, folder)
    return folder


def test_files_that_do_not_fit_their_config_are_refused(base: Path, tmp_path: Path, plain_adapter: Path) -> None:
    file, config = plain_adapter / "adapter_model.safetensors", plain_adapter / "adapter_config.json"
    whole, settings = load_file(file), config.read_text()
    config.write_text(json.dumps(json.loads(settings) | {"r": 4}))
    with pytest.raises(InvalidInput, match=r"A of shape \(2, 48\) .* says r 4"):
        to_folder(str(base), tmp_path / "out", adapter=plain_adapter)
    config.write_text(settings)
    for tensors, words in (
        ({}, "has no tensors, so the result would equal its base"),
        (whole | {next(iter(whole)): next(iter(whole.values())) * float("nan")}, "has NaN or infinite"),
        ({n.replace("base_model.model.", ""): t for n, t in whole.items()}, "is not one of a pair"),
    ):
        save_file(tensors, file)
        with pytest.raises(InvalidInput, match=words):
            to_folder(str(base), tmp_path / "out", adapter=plain_adapter)
    save_file(whole, file)


def test_an_adapter_of_one_of_two_tied_tensors_is_refused(tmp_path: Path) -> None:
    save_model("tied", tmp_path / "base")
    file = next(p for p in (tmp_path / "base").glob("*.safetensors") if "model.embed_tokens.weight" in load_file(p))
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    index = tmp_path / "base" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = file.name
    index.write_text(json.dumps(content))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    parts = {"lora_A": torch.ones(2, 32), "lora_B": torch.ones(23, 2)}
    save_file(
        {f"base_model.model.lm_head.{name}.weight": part for name, part in parts.items()},
        adapter / "adapter_model.safetensors",
    )
    with pytest.raises(InvalidInput, match=r"different values .*tie_word_embeddings"):
        to_folder(str(tmp_path / "base"), tmp_path / "out", adapter=adapter)

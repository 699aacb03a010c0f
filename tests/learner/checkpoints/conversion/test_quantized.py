"""A quantized folder loads in transformers with nearly the same logits and takes less room."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tiny_models import SIZES, tiny_qwen3
from transformers import AutoModelForCausalLM

from paceline.errors import InvalidInput
from paceline.files.names import EXPORT_MANIFEST
from paceline.learner.checkpoints.conversion.folders import quantize_folder

VOCABULARY = SIZES["vocab_size"]
AUTO: Any = AutoModelForCausalLM
TOKENS = torch.arange(20)[None]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_qwen3(hidden_size=64).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_without_torchao_the_extra_is_named(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"pip install 'paceline\[quantize\]'"):
        quantize_folder(str(model), tmp_path / "out", "int8")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_logits_are_nearly_those_of_the_model(model: Path, tmp_path: Path, kind: Literal["int8", "float8"]) -> None:
    pytest.importorskip("torchao", reason="needs the extra `quantize`")
    quantize_folder(str(model), tmp_path / "out", kind)
    found = AUTO.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    expected = AUTO.from_pretrained(model, dtype=torch.bfloat16)
    assert type(found.model.layers[0].self_attn.q_proj.weight).__module__.startswith("torchao.")
    with torch.no_grad():
        probabilities = [each(TOKENS).logits.float().softmax(-1) for each in (found, expected)]
    difference = (probabilities[0] - probabilities[1]).abs().mean() * VOCABULARY
    assert 0 < difference < 0.2  # 1 where two models are unrelated
    assert (tmp_path / "out" / "model.safetensors").stat().st_size < (model / "model.safetensors").stat().st_size
    assert (tmp_path / "out" / EXPORT_MANIFEST).is_file()

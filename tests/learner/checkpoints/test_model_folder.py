"""Model folders against transformers' `save_pretrained`: the same names, layouts and config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from loaded_models import differing, save_model
from safetensors.torch import load_file
from tiny_policy import CPU, make_spec
from transformers import AutoModelForCausalLM

from paceline.files.names import EXPORT_MANIFEST
from paceline.learner.checkpoints.export import export_live
from paceline.learner.model.policy import load_policy


@pytest.mark.parametrize("kind", ["tied", "untied", "moe", "bias"])
def test_the_files_are_those_of_save_pretrained(kind: str, tmp_path: Path) -> None:
    policy = make_spec(save_model(kind, tmp_path / "policy")).policy
    model = load_policy(policy, CPU)
    folder = tmp_path / "export"
    assert export_live(folder, model, policy, dtype=torch.float16, piece_bytes=300) is None
    assert differing(load_policy(make_spec(folder).policy, CPU), folder, torch.float32) == []
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float16)
    plain.save_pretrained(tmp_path / "plain")
    expected = load_file(tmp_path / "plain" / "model.safetensors")
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in (tmp_path / "plain").iterdir()} | {EXPORT_MANIFEST}
    config, other = (json.loads((at / "config.json").read_text()) for at in (folder, tmp_path / "plain"))
    assert config == other

"""Files written in pieces and read by the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from paceline.learner.checkpoints.model_folder import SafetensorsWriter, TensorHeader

TENSORS = {
    "half": torch.arange(3).half(),
    "a": torch.arange(24.0).view(4, 6),
    "none": torch.zeros(0, 3),
    "scalar": torch.tensor(5),
    "b": torch.arange(10).bfloat16(),
}
HEADERS = [TensorHeader(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()]


def write(folder: Path, max_file_bytes: int) -> None:
    with SafetensorsWriter(folder, HEADERS, max_file_bytes) as writer:
        writer.write("a", 12, TENSORS["a"].view(-1)[12:])
        for name in ("b", "scalar", "none", "half"):
            writer.write(name, 0, TENSORS[name])
        writer.write("a", 0, TENSORS["a"][:2])
        writer.finish()


def test_one_file(tmp_path: Path) -> None:
    write(tmp_path, 1 << 20)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_several_files_with_an_index(tmp_path: Path) -> None:
    write(tmp_path, 100)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(header.num_bytes for header in HEADERS)
    assert set(index["weight_map"].values()) == {f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)}
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], TENSORS[name])


def test_what_was_not_written_is_noticed(tmp_path: Path) -> None:
    with SafetensorsWriter(tmp_path, HEADERS) as writer:
        writer.write("a", 0, TENSORS["a"])
        writer.write("scalar", 0, TENSORS["scalar"])
        with pytest.raises(ValueError, match=r"'b' has type torch\.bfloat16"):
            writer.write("b", 0, TENSORS["a"])
        with pytest.raises(ValueError, match="6 bytes of tensor 'half' were not written"):
            writer.finish()

"""Slices of safetensors files, local and in an object store; damaged files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from paceline.errors import InvalidInput, Unreadable
from paceline.models.weight_files import RangedFile, WeightFiles, find_weight_files

TENSORS = {
    "a": torch.arange(60, dtype=torch.float32).view(5, 4, 3),
    "b": torch.arange(7).to(torch.bfloat16),
    "c": torch.tensor(3),
    "d": torch.zeros(0, 4),
    "e": torch.tensor([True, False]),
}


@pytest.fixture(params=["local", "memory"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    save_file(TENSORS, tmp_path / "model.safetensors")
    if request.param == "local":
        return str(tmp_path)
    url = f"memory://{uuid4().hex}"
    fsspec.filesystem("memory").put(str(tmp_path), url, recursive=True)
    return url


def test_a_range_is_read_in_several_requests(stored: str, tmp_path: Path) -> None:
    file = RangedFile(f"{stored}/model.safetensors", "it", part_bytes=50)
    whole = (tmp_path / "model.safetensors").read_bytes()
    for start, num_bytes in ((0, len(whole)), (7, 50), (9, 130), (len(whole), 0)):
        assert file.read(start, num_bytes).numpy().tobytes() == whole[start : start + num_bytes]
    file.close()


def test_slices(stored: str, tmp_path: Path) -> None:
    files = find_weight_files(stored, str(tmp_path), "policy.model_name")
    with files:
        for name, tensor in TENSORS.items():
            found = files.tensors[name]
            assert found.get_shape() == list(tensor.shape)
            assert torch.equal(found[...], tensor)
            assert found[...].dtype == tensor.dtype
        a = files.tensors["a"]
        assert torch.equal(a[slice(1, 4),], TENSORS["a"][1:4])
        assert torch.equal(a[slice(2, 9), slice(1, 3), slice(0, 1)], TENSORS["a"][2:, 1:3, :1])
        assert a[slice(0, 0), slice(0, 4), slice(0, 3)].shape == (0, 4, 3)


def test_types_of_a_model(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2).bfloat16(), "n": torch.tensor(1)}, tmp_path / "x.safetensors")
    with WeightFiles({str(tmp_path / "x.safetensors"): []}, "it") as files:
        assert files.holds_only(torch.bfloat16)
        assert not files.holds_only(torch.float32)


def _cut(data: bytes) -> bytes:
    return data[:-1]


def _no_header(data: bytes) -> bytes:
    return struct.pack("<Q", 1 << 40) + data[8:]


def _not_json(data: bytes) -> bytes:
    return data[:8] + b"}" + data[9:]


def _wrong_offsets(data: bytes) -> bytes:
    return data.replace(b'"shape":[5,4,3]', b'"shape":[5,4,4]')


def _empty(data: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("damage", [_cut, _no_header, _not_json, _wrong_offsets, _empty])
def test_a_damaged_file_is_named(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(InvalidInput, match=r"model_name 'm': .*model\.safetensors is damaged"):
        WeightFiles({str(file): []}, "policy.model_name 'm'")


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    with WeightFiles({str(file): []}, "it") as files:
        file.write_bytes(file.read_bytes()[:-200])
        with pytest.raises(InvalidInput, match="it ends at byte"):
            _ = files.tensors["a"][...]


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": {"a": "../model.safetensors"}}'])
def test_a_damaged_index_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InvalidInput, match=r"index\.json is damaged"):
        find_weight_files(str(tmp_path), str(tmp_path), "policy.model_name")


def test_a_file_that_lacks_a_tensor_of_the_index(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "one.safetensors")
    index = {"weight_map": dict.fromkeys([*TENSORS, "z"], "one.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidInput, match=r"one\.safetensors for tensor 'z'"):
        find_weight_files(str(tmp_path), str(tmp_path), "policy.model_name")
    (tmp_path / "one.safetensors").unlink()
    with pytest.raises(Unreadable, match=r"one\.safetensors"):
        find_weight_files(str(tmp_path), str(tmp_path), "policy.model_name")


def test_a_model_without_such_files(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="has no weights"):
        find_weight_files(str(tmp_path), str(tmp_path), "policy.model_name")

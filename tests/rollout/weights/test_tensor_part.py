"""Four ranks of a mesh of two dimensions store versions; whole readers and readers of a part get their bits, and no more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from box_rank import DIMENSIONS, STEPS
from ranks import run_ranks
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from paceline.groups import Version
from paceline.models.architectures import split_dimension, split_dimensions
from paceline.rollout.weights import part_fetcher
from paceline.rollout.weights.store_reader import StoreReader
from paceline.rollout.weights.tensor_part import TensorPart
from paceline.weights.object_store import WeightStore
from paceline.weights.offers import StoreOffer
from paceline.weights.store_format import StoredObject

ENGINE_RANKS = 2


def offer(folder: Path, step: int) -> StoreOffer:
    stored = json.loads((folder / "out" / f"{step}.json").read_text())
    return StoreOffer(
        "run",
        1,
        "member",
        Version(*stored["version"]),
        str(folder / "store"),
        "xxh3_64",
        StoredObject(*stored["manifest"]),
        Version(*stored["snapshot_version"]),
        StoredObject(*stored["snapshot"]),
        stored["snapshot_bytes"],
    )


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store and the whole tensors of each version."""
    folder = tmp_path_factory.mktemp("mesh")
    (folder / "out").mkdir()
    run_ranks("box_rank.py", 4, folder / "store", folder / "out", ENGINE_RANKS)
    return folder


def test_boxes_of_a_mesh_of_two_dimensions_make_the_whole_model(mesh: Path) -> None:
    reader = StoreReader(WeightStore(str(mesh / "store")), "run", threads=3)
    for step in range(STEPS):
        tensors = reader.fetch(offer(mesh, step))
        assert reader.held == Version(1, step)
        expected = load_file(mesh / "out" / f"{step}.safetensors")
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0)
    late = StoreReader(WeightStore(str(mesh / "store")), "run").fetch(offer(mesh, STEPS - 1))
    for name, tensor in expected.items():
        torch.testing.assert_close(late[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("rank", range(ENGINE_RANKS))
def test_a_rank_of_an_engine_fetches_its_part_only(
    mesh: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_fetcher, "GAP_BYTES", 0)
    part = TensorPart(rank, ENGINE_RANKS, DIMENSIONS)
    whole = StoreReader(WeightStore(str(mesh / "store")), "run")
    reader = StoreReader(WeightStore(str(mesh / "store")), "run", part)
    for step in range(STEPS):
        expected = whole.fetch(offer(mesh, step))
        tensors = reader.fetch(offer(mesh, step))
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            dim = split_dimension(DIMENSIONS, name, tuple(tensor.shape), ENGINE_RANKS)
            own = tensor if dim is None else tensor.chunk(ENGINE_RANKS, dim)[rank]
            torch.testing.assert_close(tensors[name], own, rtol=0, atol=0)
    sizes = {
        name: tensor.nbytes / (1 if split_dimension(DIMENSIONS, name, tuple(tensor.shape), 2) is None else 2)
        for name, tensor in expected.items()
    }
    needed = sum(sizes.values())
    snapshot = StoreReader(WeightStore(str(mesh / "store")), "run", part)
    snapshot.fetch(offer(mesh, 0))
    heads = sum(path.stat().st_size for path in (mesh / "store" / "000001-00000000").iterdir()) - sum(
        tensor.nbytes for tensor in expected.values()
    )
    # Chunks of 4,000 elements: those at an edge have elements of others.
    assert snapshot.read_bytes - heads < 1.35 * needed
    assert reader.read_bytes < whole.read_bytes


def test_the_plan_of_an_architecture_is_that_of_its_weights() -> None:
    config = Qwen3Config(num_attention_heads=8, num_key_value_heads=2)
    dimensions = split_dimensions(Qwen3ForCausalLM, config, 2)
    assert split_dimension(dimensions, "model.layers.3.self_attn.q_proj.weight", (64, 32), 2) == 0
    assert split_dimension(dimensions, "model.layers.3.mlp.down_proj.weight", (32, 64), 2) == 1
    assert split_dimension(dimensions, "model.layers.3.self_attn.k_proj.weight", (16, 32), 2) == 0
    assert split_dimension(dimensions, "model.layers.3.input_layernorm.weight", (32,), 2) is None
    assert split_dimension(dimensions, "model.layers.3.mlp.down_proj.weight", (32, 65), 2) is None
    replicated = split_dimensions(Qwen3ForCausalLM, config, 4)
    assert split_dimension(replicated, "model.layers.3.self_attn.k_proj.weight", (16, 32), 4) is None

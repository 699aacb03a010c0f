"""Four ranks of a mesh of two dimensions store versions; readers get their bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from box_rank import STEPS
from ranks import run_ranks
from safetensors.torch import load_file

from paceline.groups import Version
from paceline.weights.store.object_store import WeightStore
from paceline.weights.store.reader import StoreReader
from paceline.weights.store.store_format import StoredObject, StoreOffer


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
    run_ranks("box_rank.py", 4, folder / "store", folder / "out")
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

"""Three real ranks write their own slices; a reader makes the whole model of them, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_policy import save_tiny_policy

from paceline.groups import Version
from paceline.weights.store.object_store import WeightStore
from paceline.weights.store.reader import StoreReader
from paceline.weights.store.store_format import StoredObject, StoreOffer

pytestmark = pytest.mark.slow
STEPS = 5


def offer(out: Path, store: Path, step: int) -> StoreOffer:
    stored = json.loads((out / f"{step}.json").read_text())
    return StoreOffer(
        "run",
        1,
        "member",
        Version(*stored["version"]),
        str(store),
        "xxh3_64",
        StoredObject(*stored["manifest"]),
        Version(*stored["snapshot_version"]),
        StoredObject(*stored["snapshot"]),
        stored["snapshot_bytes"],
    )


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The folder of the tied and of the untied model, after three ranks have stored versions of both."""
    folders = {tied: tmp_path_factory.mktemp(f"tied-{tied}") for tied in (True, False)}
    for tied, folder in folders.items():
        save_tiny_policy(folder / "model", tied=tied)
        (folder / "out").mkdir()
    run_ranks("store_rank.py", 3, *folders.values())
    return folders


# 23 rows over 3 ranks are shards of unequal length, norms of 8 leave the last rank 2 rows.
@pytest.mark.parametrize("tied", [True, False])
def test_three_ranks_store_what_they_would_gather(three_ranks: dict[bool, Path], tied: bool) -> None:
    store, out = three_ranks[tied] / "store", three_ranks[tied] / "out"
    reader = StoreReader(WeightStore(str(store)), "run")
    for step in range(STEPS):
        tensors = reader.fetch(offer(out, store, step))
        assert reader.held == Version(1, step)
        expected = load_file(out / f"{step}.safetensors")
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert tensors[name].dtype == torch.bfloat16
            torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0)
    late = StoreReader(WeightStore(str(store)), "run").fetch(offer(out, store, STEPS - 1))
    for name, tensor in expected.items():
        torch.testing.assert_close(late[name], tensor, rtol=0, atol=0)
    assert len(list(store.glob("*/delta.2.safetensors"))) == STEPS - 1

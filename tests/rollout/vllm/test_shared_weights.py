"""Weights from one process to others through memory: the same bytes, or a refusal."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import pytest
import torch

from paceline.errors import Unavailable
from paceline.weights.manifest import WeightManifest
from rollout.vllm.shared_weights import SharedWeights, read_shared

READER = """
import sys
from rollout.vllm.shared_weights import read_shared
def take(tensors):
    print(sorted((name, str(tensor.dtype), tensor.tolist()) for name, tensor in tensors.items()))
read_shared(sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3]), take)
"""


def weights() -> dict[str, torch.Tensor]:
    tied = torch.arange(6, dtype=torch.float32).view(2, 3)
    return {"embed": tied, "head": tied, "norm": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}


def ignore(_: dict[str, torch.Tensor]) -> None:
    return


async def test_readers_in_other_processes_see_every_tensor() -> None:
    shared = SharedWeights(weights(), num_readers=2)
    for reader in range(2):
        arguments = [shared.path, shared.manifest.hex(), str(reader)]
        seen = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", READER, *arguments], stdout=subprocess.PIPE, check=True
        )
        assert seen.stdout.decode().strip() == str(
            [
                ("embed", "torch.float32", [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]),
                ("head", "torch.float32", [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]),
                ("norm", "torch.bfloat16", [1.5, -2.0]),
            ]
        )
    await shared.verified(60)
    shared.close()


async def test_a_changed_byte_is_found_by_the_receipt() -> None:
    shared = SharedWeights(weights(), num_readers=1)
    layout = WeightManifest.from_bytes(shared.manifest)
    offset = next(entry.offset for entry in layout.entries if entry.name == "norm")
    memory = os.open(shared.path, os.O_RDWR)
    os.pwrite(memory, b"\x00", offset + 1)
    os.close(memory)
    read_shared(shared.path, shared.manifest, 0, ignore)
    with pytest.raises(Unavailable, match=r"worker 0 .* saw other bytes"):
        await shared.verified(60)
    shared.close()


async def test_a_missing_receipt_is_named() -> None:
    shared = SharedWeights(weights(), num_readers=2)
    read_shared(shared.path, shared.manifest, 1, ignore)
    with pytest.raises(Unavailable, match=r"workers \[0\] .* have not read"):
        await shared.verified(0)
    shared.close()


async def test_the_receipt_comes_after_the_tensors_were_taken() -> None:
    shared = SharedWeights(weights(), num_readers=1)
    taking, taken = threading.Event(), threading.Event()

    def take(_: dict[str, torch.Tensor]) -> None:
        taking.set()
        taken.wait(60)

    reader = threading.Thread(target=read_shared, args=(shared.path, shared.manifest, 0, take))
    reader.start()
    assert await asyncio.to_thread(taking.wait, 60)
    with pytest.raises(Unavailable, match="have not read"):
        await shared.verified(0)
    taken.set()
    await shared.verified(60)
    reader.join()
    shared.close()


def test_a_reader_keeps_its_tensors_when_the_writer_lets_go() -> None:
    shared = SharedWeights(weights(), num_readers=1)
    path = shared.path
    tensors: dict[str, torch.Tensor] = {}
    read_shared(path, shared.manifest, 0, tensors.update)
    shared.close()
    assert not os.path.exists(path)
    assert torch.equal(tensors["embed"], weights()["embed"])

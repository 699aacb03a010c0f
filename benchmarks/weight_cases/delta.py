"""The delta channel: bytes and seconds of a version, and whether what is read back is what was written.

Weights of realistic magnitudes with float32 masters take Adam steps (the spec's defaults), and each step is stored as a
version by the real writer and read by the real reader. Gradients are noise with a scale of its own for every element and
for every step, which is what bounds Adam's step from above: a gradient with a direction moves a weight further, noise
moves it by about a quarter of the learning rate. The moments are warmed up by `WARM_UP` steps, as in the middle of a run.

Source of the figure to compare with: Miahi and Belilovsky, arXiv:2602.03839 (14 GB as 108 MB, 0.77 % of the model).
"""

from __future__ import annotations

import queue
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from paceline.groups import Version
from paceline.spec import OptimizerSection
from paceline.weights.store.object_store import WeightStore
from paceline.weights.store.offers import Stored
from paceline.weights.store.rank_board import RankBoard
from paceline.weights.store.reader import StoreReader
from paceline.weights.store.store_format import StoreOffer
from paceline.weights.store.version_source import whole_slices
from paceline.weights.store.writer import StoreWriter
from weight_cases.models import random_weights

WARM_UP = 20
DEADLINE_S = 600.0


class Trained:
    """float32 masters of a model, and Adam steps on them."""

    def __init__(self, size: str, lr: float, seed: int) -> None:
        self.tensors = random_weights(size, torch.float32, seed)
        owners = {tensor.data_ptr(): tensor for tensor in self.tensors.values()}
        self._parameters = [torch.nn.Parameter(tensor) for tensor in owners.values()]
        defaults = OptimizerSection()
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=lr,
            betas=defaults.betas,
            eps=defaults.eps,
            weight_decay=defaults.weight_decay,
            fused=True,
        )
        self._generator = torch.Generator().manual_seed(seed + 1)
        self._scales = [self._noise(p).exp_().mul_(1e-4) for p in self._parameters]

    def step(self) -> None:
        """One optimizer step on a gradient of noise."""
        loudness = float(torch.randn((), generator=self._generator).mul(0.5).exp())
        for parameter, scale in zip(self._parameters, self._scales, strict=True):
            parameter.grad = self._noise(parameter).mul_(scale).mul_(loudness)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def wire(self) -> dict[str, torch.Tensor]:
        """The weights as they travel: a bfloat16 copy, tied names sharing theirs."""
        copies: dict[int, torch.Tensor] = {}
        return {
            name: copies.setdefault(tensor.data_ptr(), tensor.to(torch.bfloat16))
            for name, tensor in self.tensors.items()
        }

    def _noise(self, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=self._generator)


def measure(directory: Path, size: str, lr: float, versions: int) -> dict[str, Any]:
    """Stores and reads `versions` versions at one learning rate. Raises AssertionError when a bit differs."""
    trained = Trained(size, lr, seed=0)
    for _ in range(WARM_UP):
        trained.step()
    told: queue.Queue[Stored] = queue.Queue()
    store = WeightStore(str(directory / f"{size}-{lr}"))
    writer = StoreWriter(
        store=store,
        board=RankBoard(),
        run_id="run",
        rank=0,
        world_size=1,
        algorithm="xxh3_64",
        anchor_interval=versions + 1,
        any_rank=lambda fact: fact,
        on_stored=told.put,
        oldest_held=lambda: Version(1, 0),
    )
    reader = StoreReader(store, "run")
    fractions, write_s, read_s = [], [], []
    model_bytes = 0
    for step in range(versions + 1):
        if step:
            trained.step()
        wire = trained.wire()
        writer.put(Version(1, step), *whole_slices(wire))
        stored = told.get(timeout=DEADLINE_S)
        read_before, started_s = reader.read_bytes, time.perf_counter()
        tensors = reader.fetch(_offer(store, stored))
        elapsed_s = time.perf_counter() - started_s
        for name, tensor in wire.items():
            assert torch.equal(tensors[name].view(torch.int16), tensor.view(torch.int16)), (step, name)
        if step == 0:
            model_bytes = sum(t.nbytes for t in {t.data_ptr(): t for t in wire.values()}.values())
            continue
        fractions.append((reader.read_bytes - read_before) / model_bytes)
        write_s.append(stored.seconds)
        read_s.append(elapsed_s)
    writer.close()
    return {
        "size": size,
        "bytes": model_bytes,
        "lr": lr,
        "versions": versions,
        "payload_fraction_mean": statistics.mean(fractions),
        "payload_fraction_max": max(fractions),
        "write_s": statistics.median(write_s),
        "read_s": statistics.median(read_s),
    }


def _offer(store: WeightStore, stored: Stored) -> StoreOffer:
    return StoreOffer(
        "run",
        1,
        "reader",
        stored.version,
        store.url,
        "xxh3_64",
        stored.manifest,
        stored.snapshot_version,
        stored.snapshot,
        stored.snapshot_bytes,
    )

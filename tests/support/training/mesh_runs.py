"""Runs the ranks of a mesh (`processes/mesh_rank.py`) and compares what they have done with one rank."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mesh_cases import CASES, ROW_TOKENS, batch_of
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_policy import run_case


@dataclass(frozen=True)
class OneRank:
    """Metrics of a case's second step, and the gradients of its first update."""

    metrics: dict[str, float]
    gradients: dict[str, torch.Tensor]


def one_rank(models: Path) -> dict[str, OneRank]:
    """Train every case without other ranks."""
    return {
        name: OneRank(metrics, gradients_of(tensors))
        for name, (model, case) in CASES.items()
        for metrics, tensors in [run_case(models / model, case, batch_of(name), budget=ROW_TOKENS)]
    }


def gradients_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith("grad.")}


@dataclass(frozen=True)
class MeshRun:
    """What the ranks of one mesh have left in `out`."""

    models: Path
    out: Path
    ranks: int

    def difference(self, name: str, expected: OneRank) -> float:
        """Return the largest difference of a case: of loss and gradient norm of its second step, and of any gradient."""
        metrics = json.loads((self.out / f"{name}.json").read_text())
        found = gradients_of(load_file(self.out / f"{name}.safetensors"))
        assert found.keys() == expected.gradients.keys()
        return max(
            _distance(metrics, expected.metrics),
            *((found[key] - tensor).abs().max().item() for key, tensor in expected.gradients.items()),
        )

    def resumed_difference(self, expected: OneRank) -> float:
        """Return the largest difference of the step that followed the checkpoint."""
        return _distance(self.resumed["metrics"], expected.metrics)

    @property
    def resumed(self) -> dict[str, Any]:
        """Path and hash of the checkpoint that was written, and the metrics of the step after it."""
        facts: dict[str, Any] = json.loads((self.out / "resumed.json").read_text())
        return facts

    def faults(self, kind: str) -> list[str]:
        """Return what is wrong with the loaded, published and exported model; each element has to be published once."""
        found = [json.loads((self.out / f"{kind}.{rank}.json").read_text()) for rank in range(self.ranks)]
        faults = [str(rank[key]) for rank in found for key in ("loading", "export") if rank[key]]
        gathered = load_file(self.out / f"{kind}.gathered")
        exported = load_file(self.out / f"{kind} export" / "model.safetensors")
        for name, tensor in exported.items():
            if name in gathered and not torch.equal(tensor, gathered[name]):
                faults.append(f"{name}: exported otherwise than gathered")
        spans: dict[str, list[tuple[int, int]]] = {}
        for rank in found:
            for name, offsets, shape in rank["slices"]:
                row = math.prod(shape[1:])
                start = (offsets[0] if offsets else 0) * row
                spans.setdefault(name, []).append((start, start + math.prod(shape)))
        for name, tensor in gathered.items():
            covered = sorted(spans.get(name, []))
            if not covered and name == "lm_head.weight":
                continue  # tied
            if [0, *(end for _, end in covered)] != [*(start for start, _ in covered), tensor.numel()]:
                faults.append(f"{name}: published as {covered} of {tensor.numel()} elements")
        return faults


def run_mesh(
    models: Path,
    out: Path,
    replicate: int,
    shard: int,
    after: MeshRun | None = None,
    device: str = "cpu",
) -> MeshRun:
    """Run a mesh on CPUs or GPUs (cuda); its checkpoint follows that of `after`, or its own first step."""
    out.mkdir(parents=True)
    resumed = {"path": "", "sha256": ""} if after is None else after.resumed
    ranks = replicate * shard
    before = (resumed["path"], resumed["sha256"])
    run_ranks("mesh_rank.py", ranks, models, out, replicate, shard, *before, device)
    return MeshRun(models, out, ranks)


def _distance(metrics: dict[str, float], expected: dict[str, float]) -> float:
    return max(abs(metrics[key] - expected[key]) for key in ("loss", "grad_norm"))

"""One rank of a mesh: runs every case on its part of the batch, publishes, and goes on from another mesh's checkpoint.

Arguments: the folder of the models, the folder for results, replicate, shard, the checkpoint's folder with its hash, or two
empty texts, and the type of device (cpu or cuda).
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loaded_models import differing
from mesh_cases import CASES, ROW_TOKENS, batch_of, part_of
from safetensors.torch import save_file
from tiny_policy import CPU, make_spec, run_case

from paceline.host.process import end_process
from paceline.learner.checkpoints import checkpoint
from paceline.learner.checkpoints.export import export_live
from paceline.learner.model.policy import load_policy
from paceline.learner.step.trainer import Trainer
from paceline.learner.weights.device_snapshot import local_slices
from paceline.learner.weights.gather import gather_weights

EXACT = {"precision": "float32"}


def main(models: Path, out: Path, replicate: int, shard: int, path: str, sha256: str, kind: str) -> None:
    torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else CPU
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parallel = {"parallel": {"replicate": replicate, "shard": shard}}
    for name, (model, case) in CASES.items():
        own = part_of(batch_of(name), rank, ranks)
        metrics, tensors = run_case(models / model, case | parallel | EXACT, own, ROW_TOKENS, device)
        if rank == 0:
            (out / f"{name}.json").write_text(json.dumps(metrics))
            save_file({key: tensor.cpu() for key, tensor in tensors.items()}, out / f"{name}.safetensors")
    for name in ("dense", "moe"):
        policy = make_spec(models / name, **parallel, **EXACT).policy
        model = load_policy(policy, device)
        found: dict[str, Any] = {"loading": differing(model, models / name, torch.float32)}
        slices = [(part.block.name, part.block.offsets, part.block.shape) for part in local_slices(model, None)]
        gathered = gather_weights(model, None)
        if rank == 0:
            save_file({name: value.clone() for name, value in gathered.items()}, out / f"{name}.gathered")
        failure = export_live(out / f"{name} export", model, policy, dtype=torch.float32, piece_bytes=500)
        found |= {"slices": slices, "export": "" if failure is None else repr(failure)}
        (out / f"{name}.{rank}.json").write_text(json.dumps(found))
    checkpoints(models / "dense", out, parallel, path, sha256, device)
    end_process()


def checkpoints(model: Path, out: Path, parallel: dict[str, Any], path: str, sha256: str, device: torch.device) -> None:
    """Write a checkpoint after a step, or after one that another mesh has trained, and train a step more."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    trainer = Trainer(make_spec(model, train_mb_tokens=ROW_TOKENS, **parallel, **EXACT), device)
    own = part_of(batch_of("grpo"), rank, ranks)
    state: dict[str, Any] = {"model": trainer.model, "optimizer": trainer.optimizer}
    if path:
        checkpoint.load(path, expected_sha256=sha256, **state)
    else:
        trainer.train_step(own, 0)
    saved = checkpoint.save(out / "checkpoints", session=1, step=1, **state)
    metrics = trainer.train_step(own, 1)
    if saved is not None:
        facts = {"path": str(saved.path), "sha256": saved.manifest_sha256, "metrics": metrics}
        (out / "resumed.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:8])

"""One of two ranks: resumes, gathers, and loads what one rank wrote. Leaves its results as files.

Arguments: the policy's folder, a checkpoint of one rank and its manifest's hash, and where results go.
"""

from __future__ import annotations

import json
import shutil
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tiny_policy import CPU, make_batch, make_spec, whole

from paceline.errors import Conflict
from paceline.files.storage import Folder
from paceline.host.process import end_process
from paceline.learner.batch.samples import TrainingSample
from paceline.learner.checkpoints import checkpoint
from paceline.learner.checkpoints.manifest import read_manifest
from paceline.learner.step.trainer import Trainer
from paceline.learner.weights.gather import gather_weights


def main(policy: Path, of_one: Path, of_one_sha256: str, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    spec = make_spec(policy, train_mb_tokens=12)
    own = make_batch()[rank::2]

    uninterrupted = Trainer(spec, CPU)
    for step in range(2):
        uninterrupted.train_step(own, step)
    torch.manual_seed(50 + rank)
    saved = checkpoint.save(
        out / "checkpoints", session=1, step=2, model=uninterrupted.model, optimizer=uninterrupted.optimizer
    )
    assert (saved is None) == (rank == 1)
    if saved is not None:
        (out / "sha256").write_text(saved.manifest_sha256)
        shutil.copytree(saved.path, out / "kept")
    dist.barrier()
    expected_sha256 = (out / "sha256").read_text()
    for step in range(2, 4):
        uninterrupted.train_step(own, step)

    resumed = Trainer(spec, CPU)
    checkpoint.load(
        out / "checkpoints/1-2",
        expected_sha256=expected_sha256,
        model=resumed.model,
        optimizer=resumed.optimizer,
    )
    drawn = torch.rand(2).tolist()
    for step in range(2, 4):
        resumed.train_step(own, step)
    save_local(uninterrupted, out / f"uninterrupted.{rank}.safetensors")
    save_local(resumed, out / f"resumed.{rank}.safetensors")

    gathered = gather_weights(resumed.model, torch.bfloat16)
    if rank == 0:
        save_file({name: tensor.clone() for name, tensor in gathered.items()}, out / "gathered.safetensors")
    wholes = {name: whole(tensor.detach()).clone() for name, tensor in resumed.model.named_parameters()}
    if rank == 0:
        save_file(wholes, out / "whole.safetensors")

    from_one = Trainer(spec, CPU)
    manifest = checkpoint.load(
        of_one, expected_sha256=of_one_sha256, model=from_one.model, optimizer=from_one.optimizer
    )
    from_one.train_step(own, manifest.step)
    wholes = {name: whole(tensor.detach()).clone() for name, tensor in from_one.model.named_parameters()}
    if rank == 0:
        save_file(wholes, out / "from_one.safetensors")

    check_synced_reference(policy, own, out)

    # Rank 1 reads every second file: the damage is in one that only one of the two looks into.
    if rank == 0:
        damaged = out / "checkpoints/1-2/__1_0.distcp"
        data = bytearray(damaged.read_bytes())
        data[-1] ^= 1
        damaged.write_bytes(data)
    dist.barrier()
    try:
        checkpoint.load(out / "checkpoints/1-2", expected_sha256=expected_sha256, model=resumed.model)
        reason = ""
    except Conflict as error:
        reason = str(error)
    (out / f"rank.{rank}.json").write_text(json.dumps({"gathered": len(gathered), "refused": reason, "drawn": drawn}))
    end_process()


def check_synced_reference(policy: Path, own: list[TrainingSample], out: Path) -> None:
    """Each rank mixes its shard of the policy into the reference, and a checkpoint has the result."""
    loss_fn = {
        "reference_policy_kl_penalty": 0.1,
        "reference_policy_sync_steps": 1,
        "reference_policy_sync_mix": 1.0,
    }
    spec = make_spec(policy, train_mb_tokens=12, loss_fn=loss_fn)
    trainer = Trainer(spec, CPU)
    trainer.train_step(own, 0)
    checkpoint.save(
        out / "synced",
        session=1,
        step=1,
        model=trainer.model,
        optimizer=trainer.optimizer,
        reference=trainer.synced_reference,
    )
    dist.barrier()
    resumed = Trainer(spec, CPU)
    checkpoint.load(
        out / "synced/1-1",
        expected_sha256=read_manifest(Folder(out / "synced/1-1"))[1],
        model=resumed.model,
        optimizer=resumed.optimizer,
        reference=resumed.synced_reference,
    )
    assert resumed.synced_reference is not None
    references = dict(resumed.synced_reference.named_parameters())
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(local(references[name]), local(parameter))


def save_local(trainer: Trainer, path: Path) -> None:
    save_file({name: local(tensor) for name, tensor in trainer.model.named_parameters()}, path)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_local().clone()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))

"""One rank of the two-rank tests: runs every case on its part of the batch and leaves the results as files."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tiny_policy import CASES, CPU, batch_of, make_batch, make_spec, rank_part, run_case

from learner.collectives import end_process
from learner.trainer import Trainer
from paceline.errors import NonFiniteLoss


def main(model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    for name, case in CASES.items():
        own = rank_part(batch_of(name), rank)  # rank 1 has less, so it fills up with dummy passes
        metrics, tensors = run_case(model, case, own, budget=12)
        (out / f"{name}.{rank}.json").write_text(json.dumps(metrics))
        save_file(tensors, out / f"{name}.{rank}.safetensors")
    (out / f"non_finite.{rank}.json").write_text(json.dumps(non_finite(model, rank)))
    end_process()


def non_finite(model: Path, rank: int) -> dict[str, object]:
    """Rank 1 alone has a NaN; both must say so, and both must be able to go on."""
    trainer = Trainer(make_spec(model, train_mb_tokens=12), CPU)
    batch = make_batch()
    own = rank_part(batch, rank)
    broken = list(own)
    if rank == 1:
        broken[0].behaviour_logprobs_T[0] = float("nan")
    try:
        trainer.train_step(broken, 0)
    except NonFiniteLoss as error:
        group_ids = error.group_ids
    else:
        group_ids = ()
    if rank == 1:
        broken[0].behaviour_logprobs_T[0] = -3.0
    return {"group_ids": group_ids, "loss_after": trainer.train_step(own, 0)["loss"]}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

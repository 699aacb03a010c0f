"""One rank of a learner that stores versions: it trains, writes its slices, and leaves the whole weights as files.

Arguments: folders with a model each, of which each gets a store and what is left for the test.
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tiny_policy import CPU, make_batch, make_spec

from paceline.groups import Version
from paceline.host.process import end_process
from paceline.learner.collectives import any_over_ranks, broadcast_bytes
from paceline.learner.step.trainer import Trainer
from paceline.learner.weights.device_snapshot import local_slices
from paceline.learner.weights.gather import gather_weights, plan_tensors
from paceline.weights.store.object_store import WeightStore
from paceline.weights.store.offers import Stored
from paceline.weights.store.rank_board import make_board
from paceline.weights.store.writer import StoreWriter

STEPS = 5


def main(*folders: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    for folder in folders:
        store_versions(folder / "model", folder / "store", folder / "out")
    end_process()


def store_versions(model: Path, store: Path, out: Path) -> None:
    """Five versions of a model."""
    rank = dist.get_rank()
    trainer = Trainer(make_spec(model, train_mb_tokens=12), CPU)
    told = threading.Semaphore(0)

    def on_stored(stored: Stored) -> None:
        (out / f"{stored.version.step}.json").write_text(json.dumps(asdict(stored)))
        told.release()

    writer = StoreWriter(
        store=WeightStore(str(store)),
        board=make_board("127.0.0.1", "127.0.0.1", broadcast_bytes),
        run_id="run",
        rank=rank,
        world_size=dist.get_world_size(),
        algorithm="xxh3_64",
        anchor_interval=3,
        any_rank=lambda fact: any_over_ranks([fact], torch.device("cpu"))[0],
        on_stored=on_stored,
        oldest_held=lambda: Version(1, 0),  # so that nothing is pruned
    )
    tensors = plan_tensors(trainer.model, torch.bfloat16)
    for step in range(STEPS):
        if step:
            trainer.train_step(make_batch()[rank::3], step)
        writer.put(Version(1, step), local_slices(trainer.model, torch.bfloat16), tensors)
        whole = gather_weights(trainer.model, torch.bfloat16)
        if rank == 0:
            save_file({name: t.clone() for name, t in whole.items()}, out / f"{step}.safetensors")
            while not (out / f"{step}.json").exists():
                assert told.acquire(timeout=60)
        dist.barrier()
    writer.check()
    writer.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

"""One of four ranks whose tensors a mesh of two dimensions divides: it stores versions, and leaves the whole tensors as files.

Arguments: a folder for the store, and one for the tensors.
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
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from paceline.groups import Version
from paceline.host.process import end_process
from paceline.learner.collectives import any_over_ranks, broadcast_bytes
from paceline.learner.weights.device_snapshot import DeviceSnapshot
from paceline.learner.weights.gather import plan_tensors
from paceline.weights.store.object_store import WeightStore
from paceline.weights.store.offers import Stored
from paceline.weights.store.rank_board import make_board
from paceline.weights.store.writer import StoreWriter

STEPS = 4
CHUNK_ELEMENTS = 4_000
PLACEMENTS = {
    # name: shape, placements on the mesh of 2 x 2 ranks
    "model.layers.0.rows.weight": ((300, 40), (Replicate(), Shard(0))),
    "model.layers.0.columns.weight": ((40, 300), (Shard(0), Shard(1))),
    "model.layers.1.rows.weight": ((301, 40), (Shard(0), Shard(0))),
    "model.layers.1.columns.weight": ((41, 300), (Shard(1), Replicate())),
    "experts": ((3, 50, 60), (Shard(1), Shard(0))),
    "norm": ((40,), (Replicate(), Replicate())),
}


class Divided(nn.Module):
    """Parameters with the names and placements above."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2, 2))
        self.tensors = nn.ParameterDict()
        self.named = {}
        for name, (shape, placements) in PLACEMENTS.items():
            whole = torch.randn(shape) * 0.02
            self.named[name] = nn.Parameter(distribute_tensor(whole, mesh, placements))
        self.bare = nn.Parameter(torch.randn(7))

    def state_dict(self, *args: object, **kwargs: object) -> dict[str, Tensor]:  # type: ignore[override]
        """Under names of an architecture."""
        return {**self.named, "bare": self.bare}

    @torch.no_grad()
    def train_step(self, step: int) -> None:
        """Change about one element in fifty."""
        generator = torch.Generator().manual_seed(step)
        for tensor in self.state_dict().values():
            whole = torch.randn(tensor.shape, generator=generator) * 1e-6
            if isinstance(tensor, DTensor):
                tensor += distribute_tensor(whole, tensor.device_mesh, tensor.placements)
            else:
                tensor += whole


def main(store: str, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, model = dist.get_rank(), Divided()
    told = threading.Semaphore(0)

    def on_stored(stored: Stored) -> None:
        (out / f"{stored.version.step}.json").write_text(json.dumps(asdict(stored)))
        told.release()

    writer = StoreWriter(
        store=WeightStore(store),
        board=make_board("127.0.0.1", "127.0.0.1", broadcast_bytes),
        run_id="run",
        rank=rank,
        world_size=4,
        algorithm="xxh3_64",
        anchor_interval=100,
        any_rank=lambda fact: any_over_ranks([fact], torch.device("cpu"))[0],
        on_stored=on_stored,
        oldest_held=lambda: Version(1, 0),
        threads=2,
        chunk_elements=CHUNK_ELEMENTS,
    )
    tensors = plan_tensors(model, torch.bfloat16)
    snapshot = DeviceSnapshot(model, torch.bfloat16, CHUNK_ELEMENTS)
    for step in range(STEPS):
        if step:
            model.train_step(step)
        writer.take(Version(1, step), snapshot.take, tensors)
        whole = {
            name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
            for name, tensor in model.state_dict().items()
        }
        if rank == 0:
            save_file(
                {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in whole.items()},
                out / f"{step}.safetensors",
            )
            while not (out / f"{step}.json").exists():
                assert told.acquire(timeout=60)
        dist.barrier()
    writer.check()
    writer.close()
    end_process()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

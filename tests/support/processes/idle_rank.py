"""One of two ranks of a learner's session that train nothing. It leaves its results as a file.

Arguments: the folder for results.
"""

from __future__ import annotations

import json
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from paceline.errors import PacelineError
from paceline.host.process import end_process
from paceline.learner.weights.gather import gather_weights
from paceline.services.learner.context import ExportOrder, Orders, Place
from paceline.services.learner.training.batches import RankBatch
from paceline.services.learner.training.run import LearnerRun
from paceline.spec.reading import parse_spec, spec_to_yaml
from paceline.v1 import exchange_pb2 as pb
from paceline.v1 import worker_pb2

SPEC = {"policy": {"model_name": "./nowhere"}, "data": {"train": "d"}, "rewards": [{"function": "length"}]}
CHAINS = (["before", "after", "after"], ["after", "after", "after"])
"""Chains of the batches that each rank gets in turn: the batch is fixed anew when rank 0 has its part."""


class Batches:
    """Returns batches that contain only their chain."""

    def __init__(self, chains: list[str]) -> None:
        self.chains = iter(chains)
        self.fetched = 0

    def fetch(self, step: int) -> RankBatch:
        self.fetched += 1
        return RankBatch(pb.BatchReply(step=step, chain=next(self.chains)), [])


def main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    number = dist.get_rank()
    rank = SimpleNamespace(
        place=Place(number, 2, torch.device("cpu")),
        orders=Orders(),
        stopping=threading.Event(),
        report=lambda _: None,
    )
    assignment = worker_pb2.RunAssignment(
        run_id="test-1", session=1, directory=str(out), spec_yaml=spec_to_yaml(parse_spec(SPEC))
    )
    session = LearnerRun(assignment, rank)  # type: ignore[arg-type]
    batches: Any = Batches(CHAINS[number])
    session._batches = batches
    batch = session._next_batch()
    met = {"chain": batch.reply.chain if batch else "", "fetched": batches.fetched}
    met |= export_twice(session, rank)
    (out / f"rank.{number}.json").write_text(json.dumps(met))
    end_process()


def export_twice(session: LearnerRun, rank: Any) -> dict[str, Any]:
    """An export that rank 0 cannot write, because the model's config is gone, and what is gathered afterwards."""
    module: Any = torch.nn.Linear(4, 4)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    session._trainer = SimpleNamespace(model=module)  # type: ignore[assignment]
    waiting = rank.orders.ask_export(ExportOrder("now", False)) if rank.place.rank == 0 else None
    session._exports.carry_out_orders(module, session.step)
    failure = waiting.exception(0) if waiting is not None else None
    assert failure is None or isinstance(failure, PacelineError)
    return {"failure": str(failure or ""), "gathered": sorted(gather_weights(module, None))}


if __name__ == "__main__":
    main(Path(sys.argv[1]))

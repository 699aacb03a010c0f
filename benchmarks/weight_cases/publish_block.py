"""The time for which publishing blocks training, against one copy of the same shards in memory.

Two ranks share a model by FSDP2 on gloo. In turns in one run each copies its shards into memory that it keeps, and stages a
version in its host's memory by the host's agent (`paceline.weights.hosts.stage`); ranks begin together each time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from paceline.groups import Version
from paceline.learner.weights.shard_writer import ShardWriter
from paceline.weights.hosts.client import RelayClient
from paceline.weights.hosts.local_socket import LABEL_VARIABLE, socket_name
from paceline.weights.hosts.stage import RankStage

ROOT = Path(__file__).resolve().parents[2]
SIDE = 4096
RANKS = 2
COPIES = 5
"""Copies of the model in memory: shards, two segments, the copy that is compared with, and room."""
TIMEOUT_S = 900.0


def missing(size_bytes: int) -> str:
    """Return what this machine lacks; empty if nothing."""
    needed, free = COPIES * size_bytes, psutil.virtual_memory().available
    return f"it needs {needed / 1e9:.0f} GB of memory, {free / 1e9:.0f} are free" if needed > free else ""


def measure(size_bytes: int, versions: int) -> dict[str, Any]:
    """Start the ranks and return what the slower one saw."""
    with tempfile.TemporaryDirectory(prefix="paceline-block-") as name:
        environment = os.environ | {
            LABEL_VARIABLE: name,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "benchmarks"))),
            "OMP_NUM_THREADS": "1",
        }
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "weight_cases.publish_block",
                    name,
                    str(rank),
                    str(size_bytes),
                    str(versions),
                ],
                env=environment,
                stdout=subprocess.PIPE,
            )
            for rank in range(RANKS)
        ]
        found = [json.loads(rank.communicate(timeout=TIMEOUT_S)[0].splitlines()[-1]) for rank in ranks]
    block_s = [max(pair) for pair in zip(*(one["block_s"] for one in found), strict=True)]
    copy_s = [max(pair) for pair in zip(*(one["copy_s"] for one in found), strict=True)]
    return {
        "bytes": size_bytes,
        "ranks": RANKS,
        "block_s": round(median(block_s), 4),
        "memcpy_s": round(median(copy_s), 4),
        "first_block_s": round(max(one["first_block_s"] for one in found), 4),
        "resident_mb_by_version": found[0]["resident_mb"],
        "publish_block_over_memcpy": round(
            median(block / copy for block, copy in zip(block_s, copy_s, strict=True)), 3
        ),
    }


def _rank(folder: Path, rank: int, size_bytes: int, versions: int) -> dict[str, Any]:
    store = dist.FileStore(str(folder / "ranks"), RANKS)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    layers = max(1, size_bytes // (4 * SIDE * SIDE))
    model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(layers)))
    fully_shard(model)
    client = RelayClient(socket_name("benchmark", "127.0.0.1"), "127.0.0.1", "127.0.0.1")
    client.start()
    if not client.wait(60.0):
        raise SystemExit("no agent")
    writer = ShardWriter(model, torch.float32, "run", [0] * RANKS, "xxh3_128")
    staged = threading.Event()
    stage = RankStage(
        client,
        writer.manifest,
        source=0,
        local_ranks=RANKS,
        token=b"t" * 32,
        on_staged=lambda *_: staged.set(),
        on_held=lambda *_: None,
        on_replaced=lambda: None,
    )
    shards = [parameter.to_local() for parameter in model.parameters()]  # type: ignore[attr-defined]
    kept = [torch.empty_like(shard).fill_(0) for shard in shards]
    block_s, copy_s, resident_mb = [], [], []
    for step in range(versions + 2):
        dist.barrier()
        started_s = time.perf_counter()
        with torch.no_grad():
            for target, shard in zip(kept, shards, strict=True):
                target.copy_(shard)
        copied_s = time.perf_counter() - started_s
        dist.barrier()
        staged.clear()
        blocked_s = stage.publish(Version(1, step), lambda segment: writer.write(model, segment))
        if not staged.wait(TIMEOUT_S):
            raise SystemExit("a version was not staged")
        copy_s.append(copied_s)
        block_s.append(blocked_s)
        resident_mb.append(round(psutil.Process().memory_info().rss / 1e6))
    # The first two versions touch their memory for the first time.
    return {
        "block_s": block_s[2:],
        "copy_s": copy_s[2:],
        "first_block_s": block_s[0],
        "resident_mb": resident_mb,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(_rank(Path(sys.argv[1]), *map(int, sys.argv[2:5]))), flush=True)
    os._exit(0)

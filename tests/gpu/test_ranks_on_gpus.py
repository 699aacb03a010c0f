"""Two ranks with a GPU each: FSDP2 and replicas over NCCL against one rank on a CPU, and the death of a peer (campaign `gpu`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_device import ON_CPU
from mesh_cases import CASES, save_models
from mesh_runs import one_rank, run_mesh
from ranks import PATHS

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

TOLERANCE = 1e-3
PEER = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from paceline.services.learner.rank_group import form_rank_group, set_collective_timeout
rank, cuda = int(os.environ["RANK"]), sys.argv[1] == "cuda"
if cuda:
    torch.cuda.set_device(rank)
form_rank_group("127.0.0.1", cuda=cuda)
set_collective_timeout(10.0)
numbers = torch.ones(1 << 20, device="cuda" if cuda else "cpu")
dist.all_reduce(numbers)
if rank == 1:
    os._exit(7)
for _ in range(3):
    dist.all_reduce(numbers)
print(float(numbers[0].item()))
"""


def kind() -> str:
    if ON_CPU:
        return "cpu"
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return "cuda"


@pytest.mark.parametrize(("replicate", "shard"), [(1, 2), (2, 1)])
def test_two_ranks_compute_what_one_does(replicate: int, shard: int, tmp_path: Path) -> None:
    device = kind()
    models = tmp_path / "models"
    models.mkdir()
    save_models(models)
    expected = one_rank(models)
    run = run_mesh(models, tmp_path / "out", replicate, shard, device=device)
    for name in CASES:
        assert run.difference(name, expected[name]) < TOLERANCE, name
    for name in ("dense", "moe"):
        assert run.faults(name) == []


def test_the_death_of_a_peer_ends_the_other_within_the_time_out(tmp_path: Path) -> None:
    device = kind()
    meeting = {"PACELINE_RANKS_FILE": str(tmp_path / "meeting")}
    environment = {**os.environ, **meeting, "PYTHONPATH": PATHS, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PEER, device],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        assert processes[1].wait(timeout=120) == 7
        assert processes[0].wait(timeout=120) != 0
    finally:
        for process in processes:
            process.kill()
            process.wait()

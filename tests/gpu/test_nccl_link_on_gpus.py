"""NCCL links between two GPUs, a process each: bytes pass, and a peer that dies costs this link alone (`make gpu`)."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.errors import Unavailable
from paceline.weights.manifest import TensorPlan, WeightManifest
from paceline.weights.nccl_library import LoadedNccl
from paceline.weights.nccl_link import RECEIVER, SENDER, CudaStream, TensorMemory, form_nccl_link

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

SIZE = 256 << 20
MANIFEST = WeightManifest.plan([TensorPlan("t", "uint8", (SIZE,), None)], bucket_bytes=32 << 20)
MAX_WAIT_S = 20.0


def _side(rank: int, port: int, pipe: Connection, dies: bool) -> None:
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    link = form_nccl_link(LoadedNccl(), store, rank, CudaStream(), MAX_WAIT_S)
    memory = torch.arange(SIZE, device="cuda").to(torch.uint8) if rank == SENDER else None
    if memory is None:
        memory = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
        link.receive(TensorMemory(memory), MANIFEST)
        pipe.send(bool((memory == torch.arange(SIZE, device="cuda").to(torch.uint8)).all()))
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return
    torch.cuda.synchronize()
    link.send(TensorMemory(memory), MANIFEST)
    try:
        if dies:
            link.send(TensorMemory(memory), MANIFEST)
    except Unavailable as error:
        # This process computes on, as a learner would.
        pipe.send((str(error), float(torch.ones(4, device="cuda").sum())))
        return
    pipe.send(True)


@pytest.mark.parametrize("dies", [False, True])
def test_a_version_passes_between_two_gpus_and_a_dead_peer_is_left(dies: bool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    context = multiprocessing.get_context("spawn")
    ends: list[Any] = []
    for rank in (SENDER, RECEIVER):
        ours, theirs = context.Pipe()
        process = context.Process(target=_side, args=(rank, store.port, theirs, dies))
        process.start()
        ends.append((process, ours))
    assert ends[RECEIVER][1].poll(120)
    assert ends[RECEIVER][1].recv() is True
    assert ends[SENDER][1].poll(120)
    found = ends[SENDER][1].recv()
    assert (found[1] == 4.0) if dies else (found is True)
    for process, _ in ends:
        process.join(60)

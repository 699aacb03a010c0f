"""NCCL without blocking, on real GPUs: bytes pass, and a peer that never comes or dies costs its communicator alone (campaign `gpu`)."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from paceline.errors import Unavailable
from paceline.weights.nccl_library import LoadedNccl

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

SENDER, RECEIVER = 0, 1
SIZE = 256 << 20
MAX_WAIT_S = 20.0


def _wait(is_done: Callable[[], bool]) -> None:
    """Poll until it is done. Raises Unavailable of NCCL, or after the deadline."""
    deadline_s = time.monotonic() + MAX_WAIT_S
    while not is_done():
        if time.monotonic() > deadline_s:
            raise Unavailable(f"not done within {MAX_WAIT_S} s")
        time.sleep(0.001)


def _needs_gpus(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices")


def test_one_gpu_forms_a_communicator_and_leaves_one_whose_peer_never_comes() -> None:
    _needs_gpus(1)
    torch.cuda.set_device(0)
    nccl = LoadedNccl()
    assert nccl.version() > 21400
    alone = nccl.begin(nccl.unique_id(), 0, 1)
    _wait(lambda: nccl.done(alone))
    waiting = nccl.begin(nccl.unique_id(), 0, 2)
    assert not nccl.done(waiting)
    nccl.abort(waiting)
    assert nccl.done(alone)  # the other communicator of the process is unharmed
    assert float(torch.ones(4, device="cuda").sum()) == 4.0
    nccl.abort(alone)


def _side(rank: int, unique_id: bytes, pipe: Connection, dies: bool) -> None:
    torch.cuda.set_device(rank)
    nccl, stream = LoadedNccl(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    expected = torch.arange(SIZE, device="cuda").to(torch.uint8)
    memory = expected.clone() if rank == SENDER else torch.zeros_like(expected)
    torch.cuda.synchronize()
    communicator = nccl.begin(unique_id, rank, 2)

    def passed() -> bool:
        # The library first, because a failed communicator's stream may never run dry.
        return nccl.done(communicator) and bool(stream.query())

    def transfer() -> None:
        call = nccl.send if rank == SENDER else nccl.receive
        call(communicator, memory.data_ptr(), SIZE, 1 - rank, int(stream.cuda_stream))
        _wait(passed)

    _wait(lambda: nccl.done(communicator))
    transfer()
    pipe.send(bool((memory == expected).all()))
    if dies and rank == RECEIVER:
        os.kill(os.getpid(), signal.SIGKILL)
    if dies:
        try:
            transfer()
        except Unavailable:
            nccl.abort(communicator)
            # This process computes on, as a learner would.
            pipe.send(float(torch.ones(4, device="cuda").sum()))
            return
    nccl.abort(communicator)


@pytest.mark.parametrize("dies", [False, True])
def test_bytes_pass_between_two_gpus_and_a_dead_peer_is_left(dies: bool) -> None:
    _needs_gpus(2)
    unique_id = LoadedNccl().unique_id()
    context = multiprocessing.get_context("spawn")
    ends: list[Any] = []
    for rank in (SENDER, RECEIVER):
        ours, theirs = context.Pipe()
        process = context.Process(target=_side, args=(rank, unique_id, theirs, dies))
        process.start()
        ends.append((process, ours))
    for _, ours in ends:
        assert ours.poll(120)
        assert ours.recv() is True
    if dies:
        assert ends[SENDER][1].poll(120)
        assert ends[SENDER][1].recv() == 4.0
    for process, _ in ends:
        process.join(60)

"""Sets up the device of a learner's rank, and the process group of the ranks, on sockets that only this host can reach.

Ranks of one host meet in the file that their launcher passes to them (`launcher.py`). gloo's connections between them
listen on loopback, whatever `--host` says; NCCL's connections listen on the interface of `--host`, because the process
may also need NCCL towards other hosts. Ranks on several hosts meet in their nodes' rendezvous store
(`nodes/launcher.py`), and gloo and NCCL take the interface by which this host reaches the store. Ranks of another
launcher meet as torch's environment variables say.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from paceline.errors import Unavailable
from paceline.learner.model.determinism import reserve_workspace
from paceline.learner.model.mesh import mesh_groups
from paceline.services.common.gpus import unused_gpus
from paceline.services.common.serving.endpoints import advertised_host
from paceline.services.learner.launcher import MEETING_VARIABLE

STORE_VARIABLE = "PACELINE_RANKS_STORE"
"""Environment variable with HOST:PORT of the rendezvous store for ranks on several hosts."""
SESSION_VARIABLE = "PACELINE_RANKS_SESSION"
"""Environment variable with the name of the ranks' session in the rendezvous store."""
LOADING_TIMEOUT_S = 1800.0
"""Seconds that a rank may be silent while it loads models or writes files; the launcher notices a death earlier."""
COLLECTIVE_TIMEOUT_S = 300.0
"""Seconds. Once the first step has been trained, the other ranks end if a rank is silent for this long."""


def form_rank_group(host: str, *, cuda: bool) -> None:
    """Make the default process group, if this process is one of several ranks. The service listens on `host`."""
    meeting, store_address = os.environ.get(MEETING_VARIABLE), os.environ.get(STORE_VARIABLE)
    if store_address:
        _keep_to_interface(host, store_address)
    elif meeting or "RANK" not in os.environ:
        _keep_to_this_host(host)
    if "RANK" not in os.environ:
        return
    backend, timeout = "cuda:nccl,cpu:gloo" if cuda else "gloo", timedelta(seconds=LOADING_TIMEOUT_S)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store: Any
    if store_address:
        store = _session_store(store_address)
    elif meeting:
        store = dist.FileStore(meeting, world_size)  # type: ignore[attr-defined]
    else:
        dist.init_process_group(backend, timeout=timeout)
        return
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def meeting_host() -> str:
    """Return the host where ranks of several hosts meet; empty if all ranks are on this host."""
    address = os.environ.get(STORE_VARIABLE, "")
    if address:
        return address.rpartition(":")[0]
    by_launcher = "RANK" in os.environ and MEETING_VARIABLE not in os.environ
    return os.environ.get("MASTER_ADDR", "") if by_launcher else ""


def set_collective_timeout(seconds: float) -> None:
    """Set how long later collectives of this rank wait for the other ranks."""
    if dist.is_initialized():
        for group in (dist.group.WORLD, *mesh_groups()):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


@contextmanager
def long_collectives() -> Iterator[None]:
    """Allow LOADING_TIMEOUT_S for collectives in the block, because a rank may read or write large files meanwhile."""
    if not dist.is_initialized():
        yield
        return
    backend: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    before_s = backend.options._timeout.total_seconds()
    set_collective_timeout(LOADING_TIMEOUT_S)
    try:
        yield
    finally:
        set_collective_timeout(before_s)


def _session_store(address: str) -> Any:
    name, _, port = address.rpartition(":")
    wait = timedelta(seconds=LOADING_TIMEOUT_S)
    store = dist.TCPStore(name.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=wait)  # type: ignore[attr-defined]
    return dist.PrefixStore(os.environ[SESSION_VARIABLE], store)  # type: ignore[attr-defined]


def interface_of(host: str) -> str | None:
    """Return the name of the network interface that has this address; None for a wildcard or an unknown address."""
    try:
        addresses_of_host = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] in addresses_of_host for address in addresses):
            return name
    return None


def _keep_to_this_host(host: str) -> None:
    """Make gloo use the loopback interface, and NCCL the interface of `host`, by environment variables."""
    loopback = interface_of("127.0.0.1")
    if loopback is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    outer = interface_of(host)
    if outer is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={outer}")


def _keep_to_interface(host: str, address: str) -> None:
    """For several hosts: make gloo and NCCL use the interface of `host`, else that of the route to `address`."""
    name = interface_of(host) or interface_of(advertised_host("", "", address))
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


log = logging.getLogger(__name__)


def set_up_device(device: str, host: str) -> torch.device:
    """Return the device of this rank, and make the process group if there are several ranks. `device` is `auto`, `cuda`
    or `cpu`. The service listens on `host`. Raises Unavailable if the GPU cannot be used."""
    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if device == "cuda" and not torch.cuda.is_available():
        raise Unavailable(
            f"--device is cuda, but torch {torch.__version__} finds no GPU that it can use; see `paceline doctor`"
        )
    rank = int(os.environ.get("LOCAL_RANK", 0))
    if cuda and rank >= (number := torch.cuda.device_count()):
        raise Unavailable(
            f"rank {rank} (counted from 0) of the learner needs a GPU for itself, but torch finds only {number}; see "
            "`paceline doctor`, or start fewer ranks (cluster.learner_ranks)"
        )
    if device == "auto" and not cuda and (idle := unused_gpus("learner")):
        log.warning("%s", idle)
    if cuda:
        reserve_workspace()
        # Rows of ever new lengths fragment the memory.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(rank)
    form_rank_group(host, cuda=cuda)
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")

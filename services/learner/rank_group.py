"""The process group of the learner's ranks, on sockets that only this host can reach.

Ranks of one host meet in the file that their launcher passes to them (`launcher.py`): no rendezvous listens, and no message
from outside is read. gloo's connections between ranks listen on loopback, whatever `--host` says; NCCL's on the interface of
`--host`, because the process may also need NCCL towards other hosts. Ranks that another launcher started, on several
hosts, meet as torch's environment variables say.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import torch.distributed as dist

from services.learner.launcher import MEETING_VARIABLE

COLLECTIVE_TIMEOUT_S = 1800.0
"""Seconds of a rank's silence after which the others end; the launcher notices a death much earlier."""


def form_rank_group(host: str, *, cuda: bool) -> None:
    """Make the default process group, if this process is one of several ranks. `host` is what the service listens on."""
    meeting = os.environ.get(MEETING_VARIABLE)
    if meeting or "RANK" not in os.environ:
        _keep_to_this_host(host)
    if "RANK" not in os.environ:
        return
    backend, timeout = "cuda:nccl,cpu:gloo" if cuda else "gloo", timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    if not meeting:
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(meeting, world_size)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def interface_of(host: str) -> str | None:
    """Return the name of the network interface that has this address; None for a wildcard and for an address of no interface."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] in found for address in addresses):
            return name
    return None


def _keep_to_this_host(host: str) -> None:
    """Set the variables from which gloo and NCCL take their interface, because they would choose one that others can reach."""
    loopback = interface_of("127.0.0.1")
    if loopback is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    outer = interface_of(host)
    if outer is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={outer}")

"""The addresses that a running cluster opens to others: nothing beyond the address that it was told to listen on."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.client import Client
from paceline.services.local.cluster import ROLES, LocalCluster
from paceline.spec import RunSpec


def processes(cluster: LocalCluster) -> list[psutil.Process]:
    """Every process of the cluster, whatever started it."""
    services = [psutil.Process(pid) for role in ROLES for pid in cluster.pids(role).values()]
    return [process for one in services for process in (one, *one.children(recursive=True))]


def open_sockets(process: psutil.Process) -> list[str]:
    """Addresses on which a process takes connections (TCP) or datagrams (UDP, unless it is connected to a peer)."""
    return [
        connection.laddr.ip.removeprefix("::ffff:")
        for connection in process.net_connections("inet")
        if connection.laddr and (connection.status == psutil.CONN_LISTEN or is_open_datagram(connection))
    ]


def is_open_datagram(connection: Any) -> bool:
    """Return whether a UDP socket takes datagrams from anybody."""
    return connection.type == socket.SOCK_DGRAM and not connection.raddr


@pytest.mark.merge
@pytest.mark.slow
def test_no_process_listens_on_anything_but_the_host(
    cluster: LocalCluster,
    client: Client,
    make_spec: Callable[..., RunSpec],
    gated: Callable[[int], tuple[dict[str, Any], Path]],
) -> None:
    reward, gate = gated(4 * 8)
    run = client.submit(make_spec(rewards=[reward]))
    try:
        for event in client.watch(run.run_id):
            if event.kind == "step" and event.content["step"] == 2:
                break  # weights have been published by now, so every link and every group of ranks stands
        found = {process: open_sockets(process) for process in processes(cluster)}
    finally:
        gate.touch()
    wrong = {f"{process.name()} {process.cmdline()}": at for process, at in found.items() if set(at) - {"127.0.0.1"}}
    assert not wrong
    ranks = [at for process, at in found.items() if "paceline.services.learner.rank" in process.cmdline()]
    assert len(ranks) == 2
    assert all(ranks), "the ranks have no connections to each other?"

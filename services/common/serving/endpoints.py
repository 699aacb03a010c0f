"""Finds a worker's address for others, and detects dead connections at both ends of the exchange.

Workers dial out to the coordinator; their address is for direct connections between workers (weights) and for clients
that call a worker.

A lost packet, a NAT that has dropped the connection or a host without power give no sign, and TCP alone waits for
minutes, or forever if nothing is to be sent. So both ends send a PING of ZMTP every `PING_S` seconds and close a
connection on which nothing came for `SILENCE_S` after the PING. The worker then connects again and repeats unanswered
requests. A frame counts when it is complete: a frame that takes longer than `SILENCE_S` never arrives. A group of some
megabytes does arrive on a line of a few Mbit/s.
"""

from __future__ import annotations

import socket
from typing import Any

import zmq

from paceline.errors import InvalidInput

WILDCARDS = ("0.0.0.0", "::", "")


def advertised_host(host: str, advertise_host: str, coordinator: str) -> str:
    """Return the host that a worker names to others: `advertise_host` if given, else the host it listens on. A worker
    that listens on every address names the address of its route to `coordinator` ("host:port"); nothing is sent to
    find it. Raises InvalidInput if there is no route."""
    if advertise_host or host not in WILDCARDS:
        return advertise_host or host
    name, _, port = coordinator.rpartition(":")
    try:
        family, kind, *_, address = socket.getaddrinfo(name.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InvalidInput(
            f"--host {host!r} listens on every address, and the address for other hosts could not be found from the route "
            f"to the coordinator {coordinator!r} ({error}); give --advertise-host"
        ) from None


PING_S = 2.0
SILENCE_S = 10.0
CONNECT_S = 5.0
"""Seconds for one attempt to connect, because the kernel repeats its own attempts at ever longer intervals."""


def watch(socket: zmq.Socket[Any]) -> None:
    """Set the keepalive of a ZeroMQ socket; call this function before the socket is bound or connected."""
    for option, seconds in (
        (zmq.HEARTBEAT_IVL, PING_S),
        (zmq.HEARTBEAT_TIMEOUT, SILENCE_S),
        (zmq.HANDSHAKE_IVL, SILENCE_S),
        (zmq.CONNECT_TIMEOUT, CONNECT_S),
    ):
        socket.setsockopt(option, int(seconds * 1000))


def use_ipv6(socket: zmq.Socket[Any], endpoint: str) -> None:
    """Allow a socket to bind or connect to an IPv6 host, such as `tcp://[::1]:7071`; call this function first."""
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)


def in_brackets(host: str) -> str:
    """Return a host in the form for endpoints: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host

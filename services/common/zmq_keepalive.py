"""How both ends of the exchange notice that nobody is at the other one any more.

A network that fails need not close anything: a packet that is lost, a relay that has forgotten a connection, a host that has
lost its power say nothing, and TCP by itself looks for minutes, or for ever where nothing is to be sent. So both ends send a
PING of ZMTP every `PING_S` seconds and give up a connection on which nothing came for `SILENCE_S` after it, as the control
plane does. The worker then makes a new one and sends again what was not answered.

A frame counts when it is whole: one that needs longer than `SILENCE_S` never arrives. A group of some megabytes does on a
line of a few Mbit/s.
"""

from __future__ import annotations

from typing import Any

import zmq

PING_S = 2.0
SILENCE_S = 10.0
CONNECT_S = 5.0
"""How long an attempt to connect may take. A kernel's own attempts come further and further apart."""


def watch(socket: zmq.Socket[Any]) -> None:
    """Before it is bound or connected."""
    for option, seconds in (
        (zmq.HEARTBEAT_IVL, PING_S),
        (zmq.HEARTBEAT_TIMEOUT, SILENCE_S),
        (zmq.HANDSHAKE_IVL, SILENCE_S),
        (zmq.CONNECT_TIMEOUT, CONNECT_S),
    ):
        socket.setsockopt(option, int(seconds * 1000))


def use_ipv6(socket: zmq.Socket[Any], endpoint: str) -> None:
    """Lets a socket be bound or connected to an endpoint whose host is an IPv6 address, as `tcp://[::1]:7071`; before it is."""
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)


def in_brackets(host: str) -> str:
    """A host as an endpoint has it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host

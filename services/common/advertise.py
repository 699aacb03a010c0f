"""By which address others reach a worker: what a server binds is not always what a peer can dial.

The control plane and the exchange need none of this, since workers dial out to the coordinator. It is for what goes
straight from one worker to another (weights) and for clients that call a worker by itself.
"""

from __future__ import annotations

import socket

from paceline.errors import InvalidInput

WILDCARDS = ("0.0.0.0", "::", "")


def advertised_host(host: str, advertise_host: str, coordinator: str) -> str:
    """The host that a worker names to others: `advertise_host` where given, else the one it listens on.

    One that listens on every address names the one that it has on its way to `coordinator` ("host:port"); nothing is
    sent to find that out. Raises InvalidInput when there is no such way.
    """
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
            f"--host {host!r} listens on every address, and which of them others should use could not be found "
            f"by way of the coordinator {coordinator!r} ({error}); give --advertise-host"
        ) from None

"""The address by which others reach a worker, because a peer cannot always dial the address that a server binds.

The control plane and the exchange do not need it, because workers dial out to the coordinator. It is for direct
connections between workers (weights) and for clients that call a worker.
"""

from __future__ import annotations

import socket

from paceline.errors import InvalidInput

WILDCARDS = ("0.0.0.0", "::", "")


def advertised_host(host: str, advertise_host: str, coordinator: str) -> str:
    """Return the host that a worker names to others: `advertise_host` if given, else the host it listens on.

    A worker that listens on every address names the address of its route to `coordinator` ("host:port"); nothing is
    sent to find it. Raises InvalidInput when there is no route.
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

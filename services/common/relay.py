"""Provides two paths for large transfers. One is a worker's connection to the relay of its host: it is made when a run
first needs it, and kept for the worker's life. The other is the network interface (`--fabric`) for weights between
hosts and for a learner's collectives. Control stays on the network of the hosts' names (`--host`, `--advertise-host`),
which is often slow."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
from typing import TYPE_CHECKING

import click
import psutil

from paceline.errors import InvalidInput
from paceline.services.common.access.insecure import check_host
from paceline.v1 import worker_pb2
from paceline.weights.hosts.client import RelayClient
from paceline.weights.hosts.local_socket import socket_name

if TYPE_CHECKING:
    from paceline.spec import RunSpec

FABRIC_VARIABLE = "PACELINE_FABRIC"
"""Environment variable with the effect of --fabric; it also passes the address to a learner's ranks."""
FAMILIES = (socket.AF_INET, socket.AF_INET6)


def fabric_address(fabric: str) -> str:
    """Return this host's address on `fabric`: an interface's name (its first IPv4 address), an address of this host, or
    a network in CIDR notation that has one address of this host; empty for an empty `fabric`. Raises InvalidInput,
    which names the interfaces of this host."""
    if not fabric:
        return ""
    by_interface = addresses_by_interface()
    if fabric in by_interface:
        return min(by_interface[fabric], key=lambda address: ":" in address)
    try:
        network = ipaddress.ip_network(fabric, strict=False)
    except ValueError:
        matching = []
    else:
        everything = [address for addresses in by_interface.values() for address in addresses]
        matching = [address for address in everything if ipaddress.ip_address(address) in network]
    if len(matching) == 1:
        return matching[0]
    named = "; ".join(f"{name} {', '.join(addresses)}" for name, addresses in by_interface.items())
    why = (
        f"fits {len(matching)} addresses of this host, {', '.join(matching)}"
        if matching
        else "is not an interface, address or network of this host"
    )
    raise InvalidInput(f"--fabric {fabric!r} {why}; this host has {named}. Name one interface or its address")


def addresses_by_interface() -> dict[str, list[str]]:
    """Return the IP addresses of each interface of this host, without link-local ones."""
    by_interface = {
        name: [entry.address for entry in entries if entry.family in FAMILIES and "%" not in entry.address]
        for name, entries in psutil.net_if_addrs().items()
    }
    return {name: addresses for name, addresses in by_interface.items() if addresses}


def _resolve(context: click.Context, option: click.Parameter, fabric: str) -> str:
    try:
        address = fabric_address(fabric)
    except InvalidInput as error:
        raise click.UsageError(str(error)) from None
    if address:
        check_host(context, option, address)
        os.environ[FABRIC_VARIABLE] = address
    return address


fabric_option = click.option(
    "--fabric",
    default="",
    envvar=FABRIC_VARIABLE,
    metavar="INTERFACE|ADDRESS|NETWORK",
    callback=_resolve,
    help="Interface for weights and for the learner's collectives: its name (ib0), an address of this host, or a network "
    "(10.1.0.0/16). Default: the interface of --host or --advertise-host.",
)


ZONE_VARIABLE = "PACELINE_ZONE"
WAIT_S = 15.0
"""Seconds to wait for the host's relay; if none appears, weights come through the object store."""
MAX_ZONE = 64

log = logging.getLogger(__name__)


class RelayConnection:
    """The connection of one process. `host` is the address that a relay listens on, `advertised` the address at which others reach it."""

    def __init__(self, coordinator: str, host: str, advertised: str) -> None:
        self._coordinator, self._host, self._advertised = coordinator, host, advertised
        self._client: RelayClient | None = None

    @property
    def identity(self) -> worker_pb2.HostAgent | None:
        """Identity of the relay, for the control plane; None without a relay."""
        return self._client.identity if self._client is not None else None

    def client(self) -> RelayClient:
        """Return the connection, which may still be incomplete."""
        if self._client is None:
            name = socket_name(self._coordinator, self._host)
            zone = os.environ.get(ZONE_VARIABLE, "")
            self._client = RelayClient(name, self._host, self._advertised, zone)
            self._client.start()
        return self._client

    async def connected(self) -> RelayClient | None:
        """Return the complete connection; None, with a log line, if the connection does not become complete."""
        client = self.client()
        if await asyncio.to_thread(client.wait, WAIT_S):
            return client
        log.warning("this host has no relay for weights after %.0f s; weights come from the object store", WAIT_S)
        return None

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def goes_by_host(spec: RunSpec) -> bool:
    """Return whether the run's weights are sent through the relays of those hosts that have one."""
    return spec.weights.channel == "collective"


def _set_zone(_context: click.Context, _option: click.Parameter, zone: str) -> None:
    if len(zone) > MAX_ZONE or not zone.isprintable():
        raise click.UsageError(
            str(InvalidInput(f"--zone {zone[:80]!r} is not a name of at most {MAX_ZONE} characters"))
        )
    if zone:
        os.environ[ZONE_VARIABLE] = zone


zone_option = click.option(
    "--zone",
    default="",
    envvar=ZONE_VARIABLE,
    callback=_set_zone,
    expose_value=False,
    help="Zone of this host (region, rack): weights cross the border of two zones once. Default: all hosts are in one zone.",
)

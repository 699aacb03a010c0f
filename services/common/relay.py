"""A worker's connection to the relay of its host, made when a run first needs it, and kept for as long as the worker lives."""

from __future__ import annotations

import asyncio
import logging
import os

import click

from paceline.errors import InvalidInput
from paceline.spec import RunSpec
from paceline.v1 import worker_pb2
from paceline.weights.hosts.client import RelayClient
from paceline.weights.hosts.local_socket import socket_name

ZONE_VARIABLE = "PACELINE_ZONE"
WAIT_S = 15.0
"""Seconds in which a relay has to be there; without one, weights come by the object store."""
MAX_ZONE = 64

log = logging.getLogger(__name__)


class RelayConnection:
    """The connection of one process. `host` is the address that a relay listens on, `advertised` that at which others reach it."""

    def __init__(self, coordinator: str, host: str, advertised: str) -> None:
        self._coordinator, self._host, self._advertised = coordinator, host, advertised
        self._client: RelayClient | None = None

    @property
    def identity(self) -> worker_pb2.HostAgent | None:
        """The relay, for the control plane; None where there is none."""
        return self._client.identity if self._client is not None else None

    def client(self) -> RelayClient:
        """Return the connection, which may still be under way."""
        if self._client is None:
            name = socket_name(self._coordinator, self._host)
            zone = os.environ.get(ZONE_VARIABLE, "")
            self._client = RelayClient(name, self._host, self._advertised, zone)
            self._client.start()
        return self._client

    async def connected(self) -> RelayClient | None:
        """Return the connection, once it is there; None, with a line in the log, if it does not come."""
        client = self.client()
        if await asyncio.to_thread(client.wait, WAIT_S):
            return client
        log.warning("this host has no agent for weights after %.0f s; they come by the object store", WAIT_S)
        return None

    def close(self) -> None:
        """End the connection."""
        if self._client is not None:
            self._client.close()


def goes_by_host(spec: RunSpec) -> bool:
    """Return whether the run's weights are brought by hosts' relays, where there are any."""
    return spec.weights.channel == "collective"


def _set_zone(_context: click.Context, _option: click.Parameter, zone: str) -> None:
    if len(zone) > MAX_ZONE or not zone.isprintable():
        raise click.UsageError(
            str(InvalidInput(f"--zone {zone[:80]!r} is no name of {MAX_ZONE} characters at most"))
        )
    if zone:
        os.environ[ZONE_VARIABLE] = zone


zone_option = click.option(
    "--zone",
    default="",
    envvar=ZONE_VARIABLE,
    callback=_set_zone,
    expose_value=False,
    help="Zone of this host (region, rack): weights cross the border of two zones once. Default: one zone.",
)

"""The network interface of large transfers (`--fabric`): weights between hosts, and a learner's collectives.

Hosts often have a slow network, by which they are named and found, and a fast one for data. Control stays on the first
(`--host`, `--advertise-host`).
"""

from __future__ import annotations

import ipaddress
import os
import socket

import click
import psutil

from paceline.errors import InvalidInput
from paceline.services.common.access.insecure import check_host

VARIABLE = "PACELINE_FABRIC"
"""Environment variable that stands for the option; a learner's ranks get the address by it."""
FAMILIES = (socket.AF_INET, socket.AF_INET6)


def fabric_address(fabric: str) -> str:
    """Return this host's address on `fabric`: an interface's name, an address of this host, or a network in CIDR notation, of
    which this host has one address; empty for an empty one. Of an interface's addresses the first IPv4 one is taken.

    Raises InvalidInput that names the interfaces of this host.
    """
    if not fabric:
        return ""
    by_interface = addresses_by_interface()
    if fabric in by_interface:
        return min(by_interface[fabric], key=lambda address: ":" in address)
    try:
        network = ipaddress.ip_network(fabric, strict=False)
    except ValueError:
        found = []
    else:
        everything = [address for addresses in by_interface.values() for address in addresses]
        found = [address for address in everything if ipaddress.ip_address(address) in network]
    if len(found) == 1:
        return found[0]
    named = "; ".join(f"{name} {', '.join(addresses)}" for name, addresses in by_interface.items())
    why = (
        f"fits {len(found)} addresses of this host, {', '.join(found)}"
        if found
        else "is no interface, address or network of it"
    )
    raise InvalidInput(f"--fabric {fabric!r} {why}; this host has {named}. Name one interface or its address")


def addresses_by_interface() -> dict[str, list[str]]:
    """Return the IP addresses of each interface of this host that has any, without link-local ones."""
    found = {
        name: [entry.address for entry in entries if entry.family in FAMILIES and "%" not in entry.address]
        for name, entries in psutil.net_if_addrs().items()
    }
    return {name: addresses for name, addresses in found.items() if addresses}


def _resolve(context: click.Context, option: click.Parameter, fabric: str) -> str:
    try:
        address = fabric_address(fabric)
    except InvalidInput as error:
        raise click.UsageError(str(error)) from None
    if address:
        check_host(context, option, address)
        os.environ[VARIABLE] = address
    return address


fabric_option = click.option(
    "--fabric",
    default="",
    envvar=VARIABLE,
    metavar="INTERFACE|ADDRESS|NETWORK",
    callback=_resolve,
    help="Interface for weights and for the learner's collectives: its name (ib0), an address of this host, or a network "
    "(10.1.0.0/16). Default: that of --host or --advertise-host.",
)

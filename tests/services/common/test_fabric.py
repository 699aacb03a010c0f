"""The interface of large transfers: by name, address or network, and refused ones."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any

import click
import psutil
import pytest
from click.testing import CliRunner

from paceline.errors import InvalidInput
from paceline.services.common import relay as fabric
from paceline.services.common.access.insecure import insecure_option
from paceline.services.common.relay import fabric_address, fabric_option


def entry(address: str) -> Any:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return SimpleNamespace(family=family, address=address)


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    link = SimpleNamespace(family=socket.AF_PACKET, address="00:11:22:33:44:55")
    interfaces = {
        "lo": [entry("127.0.0.1")],
        "eth0": [link, entry("192.168.7.4"), entry("fe80::1%eth0")],
        "ib0": [entry("fd00::9"), entry("10.1.0.9")],
        "ib1": [entry("10.1.1.9")],
        "down": [link],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.delenv(fabric.FABRIC_VARIABLE, raising=False)
    monkeypatch.delenv("PACELINE_INSECURE", raising=False)


def test_an_interface_an_address_or_a_network() -> None:
    assert fabric_address("") == ""
    assert fabric_address("ib0") == "10.1.0.9"
    assert fabric_address("10.1.1.9") == "10.1.1.9"
    assert fabric_address("10.1.0.0/24") == "10.1.0.9"
    assert fabric_address("fd00::/8") == "fd00::9"


@pytest.mark.parametrize("given", ["ib7", "down", "10.2.0.0/16", "10.1.0.10", "no address"])
def test_what_this_host_has_not(given: str) -> None:
    with pytest.raises(
        InvalidInput,
        match=r"not an interface, address or network of this host; this host has lo 127\.0\.0\.1; eth0 192",
    ) as caught:
        fabric_address(given)
    assert given in str(caught.value)


def test_a_network_that_fits_twice() -> None:
    with pytest.raises(InvalidInput, match=r"fits 2 addresses of this host, 10\.1\.0\.9, 10\.1\.1\.9"):
        fabric_address("10.1.0.0/16")


def test_beyond_this_host_it_needs_insecure(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    @insecure_option
    @fabric_option
    def command(fabric: str) -> None:
        click.echo(f"uses {fabric}")

    monkeypatch.setenv(fabric.FABRIC_VARIABLE, "")  # restored after the test, because the option sets it
    refused = CliRunner().invoke(command, ["--fabric", "ib0"])
    assert refused.exit_code == 2
    assert "--fabric 10.1.0.9 is beyond this host" in refused.output
    monkeypatch.setenv("PACELINE_INSECURE", "1")
    assert CliRunner().invoke(command, ["--fabric", "ib0"]).output == "uses 10.1.0.9\n"
    assert os.environ[fabric.FABRIC_VARIABLE] == "10.1.0.9", "the ranks of a learner read it"
    assert CliRunner().invoke(command, ["--fabric", "lo"]).output == "uses 127.0.0.1\n"
    wrong = CliRunner().invoke(command, ["--fabric", "ib7"])
    assert wrong.exit_code == 2
    assert "--fabric 'ib7' is not an interface" in wrong.output

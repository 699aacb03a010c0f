"""Records of a coordinator's audit log, as `paceline audit show` prints them, and calls that have to be refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from paceline.services.cli.main import main


def paceline(*arguments: str, status: int = 0) -> str:
    """Run a command and return its output; its exit status has to be `status`."""
    done = CliRunner().invoke(main, list(arguments))
    assert done.exit_code == status, done.output
    return done.output


def shown(directory: Path) -> list[dict[str, Any]]:
    """Return all records of the coordinator with this directory."""
    lines = paceline("audit", "show", "--json", "--all", "--directory", str(directory)).splitlines()
    return [json.loads(line) for line in lines]


def found(records: list[dict[str, Any]], **wanted: str) -> list[dict[str, Any]]:
    """Return the records that have these texts in their fields."""
    return [record for record in records if all(value in str(record.get(name, "")) for name, value in wanted.items())]


async def refused(call: Any) -> grpc.StatusCode:
    """Wait for the refusal of a call, or of a stream's first answer."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if hasattr(call, "read") else call)
    return caught.value.code()


async def knock(address: str, said: bytes) -> str:
    """Connect, say something and wait for the end; return the own address."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    own = "{}:{}".format(*writer.get_extra_info("sockname"))
    writer.write(said)
    with contextlib.suppress(ConnectionResetError):
        await reader.read()
    writer.close()
    return own

"""Messages between a service and a process that runs user code: a length, then JSON, over their socket pair. Messages
are JSON and not pickle, because a reply comes from a process that runs user code, and reading a reply must not run
code."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

from paceline.errors import InvalidInput, WireError

LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 256 * 2**20


def encode(message: dict[str, Any]) -> bytes:
    """Return the frame of `message`; NumPy scalars and arrays become numbers and lists, decimals and times texts.
    Raises InvalidInput if a value has no JSON form, or the message is larger than MAX_FRAME_BYTES."""
    try:
        body = json.dumps(message, default=_plain).encode()
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"user code accepts only JSON values: {error}") from None
    if len(body) > MAX_FRAME_BYTES:
        raise InvalidInput(f"a message of {len(body)} bytes for user code exceeds {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(body)) + body


def decode(body: bytes) -> dict[str, Any]:
    """Return the message in `body`. Raises WireError if `body` is not a JSON object."""
    try:
        message = json.loads(body)
    except ValueError as error:
        raise WireError(f"a process of user code sent {body[:40]!r}, which is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise WireError(f"a process of user code sent {type(message).__name__}, not an object")
    return message


def receive(connection: socket.socket) -> dict[str, Any]:
    """Return the next message, without a deadline: an idle process waits. Raises EOFError if the service has ended."""
    (size_bytes,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    return decode(_exactly(connection, size_bytes))


async def receive_async(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the next message; the service sets the deadline. Raises EOFError if the process has ended, WireError."""
    (size_bytes,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if size_bytes > MAX_FRAME_BYTES:
        raise WireError(
            f"a process of user code announced {size_bytes} bytes, more than the {MAX_FRAME_BYTES} that are read"
        )
    return decode(await reader.readexactly(size_bytes))


def _exactly(connection: socket.socket, size_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < size_bytes:
        piece = connection.recv(min(size_bytes - len(received), 2**20))
        if not piece:
            raise EOFError("the service closed the connection")
        received += piece
    return bytes(received)


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal | date | time | timedelta):  # from tables; the ledger writes them so too
        return str(value)
    tolist = getattr(value, "tolist", None)
    if tolist is None:
        raise TypeError(f"{type(value).__name__} {repr(value)[:80]} has no JSON form")
    return tolist()

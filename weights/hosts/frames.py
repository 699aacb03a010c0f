"""Messages between the relays of two hosts, on a channel of any transport.

The listener sends a nonce of 16 bytes; the reader answers with one `ReadRequest`, whose proof shows that it knows the
secret of the run's relays. Then only the listener sends: frames of a head (kind, index, length) and `length` bytes.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct

from google.protobuf.message import DecodeError

from paceline.errors import WireError
from paceline.v1 import host_agent_pb2
from paceline.weights.hosts.transport import Channel

PROTOCOL = 1
NONCE_BYTES = 16
LENGTH = struct.Struct("<I")
HEAD = struct.Struct("<B3xIQ")
MAX_MESSAGE_BYTES = 1 << 20


class Kind(enum.IntEnum):
    """Content of a frame."""

    WAIT = 1
    """Nothing new yet: a sign of life."""
    PIECE = 2
    """A piece of the version: the frame has the piece's index and bytes."""
    MANIFEST = 3
    GONE = 4
    """The host no longer has the version, or will not get it."""
    REFUSED = 5
    """The request was refused; the frame has the reason in UTF-8."""


def send_request(channel: Channel, request: host_agent_pb2.ReadRequest) -> None:
    data = request.SerializeToString()
    channel.send(LENGTH.pack(len(data)) + data)


def receive_request(channel: Channel) -> host_agent_pb2.ReadRequest:
    """Receive the reader's only message. Raises WireError, Unavailable."""
    (length,) = LENGTH.unpack(receive(channel, LENGTH.size))
    if length > MAX_MESSAGE_BYTES:
        raise WireError(f"a relay's request has {length} bytes, more than {MAX_MESSAGE_BYTES}")
    try:
        return host_agent_pb2.ReadRequest.FromString(receive(channel, length))
    except DecodeError as error:
        raise WireError(f"the bytes received are not a request of a relay: {error}") from error


def send_frame(channel: Channel, kind: Kind, index: int = 0, data: bytes = b"") -> None:
    channel.send(HEAD.pack(kind, index, len(data)) + data)


def receive_head(channel: Channel) -> tuple[Kind, int, int]:
    """Receive kind, index and length of the next frame. Raises WireError, Unavailable."""
    kind, index, length = HEAD.unpack(receive(channel, HEAD.size))
    try:
        return Kind(kind), index, length
    except ValueError as error:
        raise WireError(f"a frame has the unknown kind {kind}") from error


def receive(channel: Channel, length: int) -> bytes:
    data = bytearray(length)
    channel.receive_into(memoryview(data))
    return bytes(data)


def proof(token: bytes, nonce: bytes) -> bytes:
    """Return the proof that its sender knows `token`."""
    return hmac.digest(token, nonce, hashlib.sha256)

"""The framing of ZMTP as a real socket writes it: whole messages come out, whatever chunks they came in."""

from __future__ import annotations

import random
import socket

import pytest
import zmq
from links.zmtp import GREETING_BYTES, LONG, MessageSplitter, Piece

DEADLINE_S = 60.0
MESSAGES = [
    [b"one frame"],
    [b"header", b"payload", b""],
    [b""],
    [b"s" * 255, b"l" * 256],
    [b"several", bytes(range(256)) * 1000, b"after a large one"],
]
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER"
ANSWER = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(52, b"\0") + bytes([4, len(READY)]) + READY
"""The first bytes from the peer of a DEALER: greeting and READY."""


@pytest.fixture(scope="module")
def recorded() -> bytes:
    """All that a DEALER writes: greeting, READY, the messages."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, int(DEADLINE_S * 1000))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(DEADLINE_S)
        dealer.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        for message in MESSAGES:
            dealer.send_multipart(message)
        dealer.close()
        peer, _ = server.accept()
        with peer:
            peer.settimeout(DEADLINE_S)
            peer.sendall(ANSWER)
            stream = b"".join(iter(lambda: peer.recv(65536), b""))
    context.term()
    return stream


def frames(message: bytes) -> list[bytes]:
    found = []
    while message:
        header = 9 if message[0] & LONG else 2
        end = header + int.from_bytes(message[1:header], "big")
        found.append(message[header:end])
        message = message[end:]
    return found


def check(pieces: list[Piece], stream: bytes) -> None:
    assert b"".join(piece.data for piece in pieces) == stream
    others = [piece.data for piece in pieces if not piece.is_message]
    assert len(b"".join(others[:-1])) == GREETING_BYTES
    assert b"READY" in others[-1]
    assert [frames(piece.data) for piece in pieces if piece.is_message] == MESSAGES


def test_messages_come_out_whole(recorded: bytes) -> None:
    check(MessageSplitter().feed(recorded), recorded)


@pytest.mark.parametrize("largest", [1, 7, 100, 5000])
def test_messages_come_out_whole_from_any_chunks(recorded: bytes, largest: int) -> None:
    rng, splitter, pieces, start = random.Random(largest), MessageSplitter(), list[Piece](), 0
    while start < len(recorded):
        size = rng.randint(1, largest)
        pieces += splitter.feed(recorded[start : start + size])
        start += size
    check(pieces, recorded)


def test_a_command_between_the_frames_of_a_message_goes_ahead_of_it() -> None:
    """ZeroMQ may write a PING there."""
    ping = b"\x04\x07\x04PING\x00\x00"
    pieces = MessageSplitter().feed(ANSWER[:GREETING_BYTES] + b"\x01\x01a" + ping + b"\x00\x01b")
    assert pieces[1:] == [Piece(ping, is_message=False), Piece(b"\x01\x01a\x00\x01b", is_message=True)]


def test_another_protocol_is_refused() -> None:
    with pytest.raises(ValueError, match="ZMTP 3"):
        MessageSplitter().feed(b"PRI * HTTP/2.0\r\n\r\n".ljust(GREETING_BYTES))

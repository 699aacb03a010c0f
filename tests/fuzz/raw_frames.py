"""Frames of ZeroMQ's own protocol (ZMTP 3.1) that no library would send: wrong lengths, flags, commands and greetings."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct

SIGNATURE = b"\xff" + b"\x00" * 8 + b"\x7f"
GREETING = SIGNATURE + b"\x03\x01" + b"NULL".ljust(20, b"\x00") + b"\x00" * 32
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
MORE, LONG, COMMAND = 1, 2, 4
CONNECT_S = 3.0
FRAMES_AT_ONCE = 8


class RawFrames:
    """Connections to the exchange that speak the protocol for a while, and then do not."""

    def __init__(self, endpoint: str, seed: int | str):
        self._host, _, self._port = endpoint.removeprefix("tcp://").rpartition(":")
        self._random = random.Random(seed)
        self.sent = 0

    async def send_one(self) -> None:
        """One connection, with some frames."""
        frames = [self.frame() for _ in range(self._random.randrange(1, FRAMES_AT_ONCE))]
        greeting = self._damaged(GREETING)
        ready = self._damaged(bytes([COMMAND, len(READY)]) + READY)
        self.sent += len(frames)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(self._host, int(self._port))
                try:
                    writer.write(greeting + ready)
                    if self._random.random() < 0.8:
                        await reader.read(len(GREETING))
                    writer.write(b"".join(frames))
                    await writer.drain()
                finally:
                    writer.transport.abort() if self._random.random() < 0.5 else writer.close()

    async def close(self) -> None:
        """Nothing stays open."""

    def _damaged(self, content: bytes) -> bytes:
        if self._random.random() > 0.1:
            return content
        torn = bytearray(content)
        torn[self._random.randrange(len(torn))] ^= 1 << self._random.randrange(8)
        return bytes(torn[: self._random.randrange(len(torn) + 1)] if self._random.random() < 0.5 else torn)

    def frame(self) -> bytes:
        """One frame, of which most are malformed."""
        dice = self._random
        body = dice.randbytes(dice.choice((0, 1, 7, 255, 256, 4000)))
        flags = dice.choice((0, MORE, LONG, LONG | MORE, COMMAND, COMMAND | LONG, COMMAND | MORE, 8, 0x80, 0xFF))
        if not flags & LONG:
            return bytes([flags, dice.choice((len(body) & 255, 0, 255))]) + body
        length = dice.choice((len(body), 0, 2**31, 2**62, 2**63, 2**64 - 1))
        return bytes([flags]) + struct.pack(">Q", length) + body

"""The harms of a link, and one direction of a connection that is harmed.

    cut        every connection is closed at once, with whatever was half sent, and new ones as they come
    drop       silence: what is sent arrives nowhere and nothing is closed, as behind a switch that is dead. At its end the
               connections that lack bytes by then are aborted, and those that were begun meanwhile
    delay      every chunk is held for 50 to 500 ms; the order within a connection stays
    truncate   every connection ends in the middle of a chunk, the ninth from now at the latest: half of it is passed on
    duplicate  whole messages come twice, or after the one that followed them, in both directions. For the exchange alone: its
               messages can be told apart (zmtp.py). gRPC's are parts of one TCP stream, of which no network doubles anything

A connection has two tasks for each direction: one reads and gives every piece the time of its arrival, one waits for that
time, or for the end of the harm, and passes the piece on.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field

from links.zmtp import MessageSplitter, Piece

HARMS = ("cut", "drop", "delay", "truncate", "duplicate")
WHOLE_CHUNKS = 8
"""Largest number of chunks that `truncate` passes on before the one that it halves."""

NEXT_S = 0.2
"""Time that a message waits for the one that is to overtake it."""

QUEUE_SIZE = 64
"""Pieces of one direction that are under way; beyond it the sender is held up."""


@dataclass
class Harm:
    """The harm of a link at present. Belongs to the proxy's loop."""

    rng: random.Random
    kind: str = ""
    """One of `HARMS`, or nothing."""
    hold_s: tuple[float, float] = (0.05, 0.5)
    """For how long `delay` holds a chunk, from and to."""
    met: Counter[str] = field(default_factory=Counter)
    """Chunks (and new connections) that were dropped, chunks that were delayed or truncated, ends of connections that the
    other side did not hear of, and messages that were doubled or swapped."""
    repaired: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.repaired.set()

    def begin(self, kind: str) -> None:
        """From here on."""
        self.kind = kind
        self.repaired.clear()

    def end(self) -> None:
        """All is well, and what was held goes on at once."""
        self.kind = ""
        self.repaired.set()


class Direction:
    """From a reader to a writer, whose write buffer has no room: what was drained is the kernel's."""

    def __init__(self, harm: Harm, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, messages: bool):
        self._harm = harm
        self._reader = reader
        self._writer = writer
        self._splitter = MessageSplitter() if messages else None
        self._under_way: asyncio.Queue[tuple[float, Piece] | None] = asyncio.Queue(QUEUE_SIZE)
        self._whole_chunks: int | None = None
        """Number of chunks still passed on before one is truncated."""

    async def take(self) -> None:
        """Reads to the end. Raises ValueError for messages that are not ZeroMQ's."""
        harm = self._harm
        while data := await self._read():
            if harm.kind == "drop":
                harm.met["dropped"] += 1
                continue
            due_s = 0.0
            if harm.kind == "delay":
                due_s = asyncio.get_running_loop().time() + harm.rng.uniform(*harm.hold_s)
                harm.met["delayed"] += 1
            for piece in self._splitter.feed(data) if self._splitter else [Piece(data, is_message=False)]:
                await self._under_way.put((due_s, piece))
        if harm.kind == "drop":
            harm.met["unheard"] += 1
            await harm.repaired.wait()
        await self._under_way.put(None)

    async def pass_on(self) -> None:
        """Writes until the end of what is read. Raises ConnectionError there, which ends the connection."""
        while (entry := await self._under_way.get()) is not None:
            due_s, piece = entry
            if due_s:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(due_s):
                        await self._harm.repaired.wait()
            await self._send(piece)
        raise ConnectionResetError("closed by the other side")

    async def _read(self) -> bytes:
        with contextlib.suppress(ConnectionError):
            return await self._reader.read(65536)
        return b""

    async def _send(self, piece: Piece) -> None:
        harm = self._harm
        if harm.kind != "truncate":
            self._whole_chunks = None
        elif self._whole_chunks is None:
            self._whole_chunks = harm.rng.randint(0, WHOLE_CHUNKS)
        if harm.kind == "drop":
            harm.met["dropped"] += 1
        elif self._whole_chunks == 0:
            harm.met["truncated"] += 1
            await self._write(piece.data[: len(piece.data) // 2])
            raise ConnectionAbortedError("truncated")
        elif harm.kind == "duplicate" and piece.is_message:
            await self._send_oddly(piece)
        else:
            if self._whole_chunks is not None:
                self._whole_chunks -= 1
            await self._write(piece.data)

    async def _send_oddly(self, message: Piece) -> None:
        """Twice, after the next one, or as it came."""
        way = self._harm.rng.choice(("doubled", "swapped", "as it came"))
        if way == "doubled":
            self._harm.met[way] += 1
            await self._write(message.data)
        elif way == "swapped":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NEXT_S):
                    entry = await self._under_way.get()
                if entry is None:
                    await self._under_way.put(entry)
                else:
                    self._harm.met[way] += entry[1].is_message
                    await self._write(entry[1].data)
        await self._write(message.data)

    async def _write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

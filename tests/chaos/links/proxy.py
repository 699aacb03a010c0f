"""A TCP relay that can be harmed (harm.py): stands between the workers and one of the coordinator's ports.

One thread runs an asyncio loop that owns everything; `harm` and `repair` post to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable

from links.harm import HARMS, Direction, Harm


class Proxy:
    """Listens on a free port of `host` and relays to `target`, which says "host:port" for each new connection; a
    target that cannot be reached, or is not known (LookupError), refuses it. `messages` says that ZeroMQ speaks here."""

    def __init__(self, target: Callable[[], str], *, messages: bool = False, host: str = "127.0.0.1", seed: int = 0):
        self.state = Harm(random.Random(seed))
        self._target = target
        self._messages = messages
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(host), self._loop).result(10)
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    @property
    def met(self) -> Counter[str]:
        """Count how often each harm has met traffic."""
        return self.state.met

    def harm(self, kind: str) -> None:
        """Begins one of `HARMS`, in place of another. Raises ValueError for what this link cannot suffer."""
        if kind not in HARMS or (kind == "duplicate" and not self._messages):
            raise ValueError(f"this link cannot suffer {kind!r}")
        self._loop.call_soon_threadsafe(self._begin, kind)

    def repair(self) -> None:
        """Lets everything through again."""
        self._loop.call_soon_threadsafe(self._end_harm)

    def close(self) -> None:
        """Ends the relay and its thread."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _listen(self, host: str) -> asyncio.Server:
        return await asyncio.start_server(self._relay, host, 0)

    async def _end(self) -> None:
        self._server.close()
        self._end_harm()
        self._abort_all()
        relays = asyncio.all_tasks() - {asyncio.current_task()}
        if relays:
            await asyncio.wait(relays, timeout=5)

    def _begin(self, kind: str) -> None:
        self._end_harm()
        self.state.begin(kind)
        if kind == "cut":
            self._abort_all()

    def _end_harm(self) -> None:
        if self.state.kind == "drop":
            self._abort_all()
        self.state.end()

    def _abort_all(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            if self.state.kind == "cut":
                return
            self._open.add(writer)
            if self.state.kind == "drop":
                self.state.met["dropped"] += 1
                await self.state.repaired.wait()
                return
            with contextlib.suppress(OSError, LookupError):
                host, _, port = self._target().rpartition(":")
                far_reader, far_writer = await asyncio.open_connection(host, int(port))
                writers.append(far_writer)
                self._open.add(far_writer)
                await self._pass_on((reader, far_writer), (far_reader, writer))
        finally:
            for each in writers:
                self._open.discard(each)
                each.transport.abort()

    async def _pass_on(self, *ends: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        """In both directions, until one of them ends."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for reader, writer in ends:
                    writer.transport.set_write_buffer_limits(0)
                    direction = Direction(self.state, reader, writer, messages=self._messages)
                    tasks.create_task(direction.take())
                    tasks.create_task(direction.pass_on())
        except* OSError:
            pass

"""A TCP relay that can be cut: stands between the workers and one of the coordinator's ports, control or exchange.

A cut closes every connection at once, with whatever was half sent, and closes new ones as they come until it is mended.
One thread runs an asyncio loop that owns everything; `cut` and `mend` post to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable


class Proxy:
    """Listens on a free port of loopback and relays to `target`, which says "host:port" for each new connection; a
    target that cannot be reached, or is not known (LookupError), refuses it."""

    def __init__(self, target: Callable[[], str]):
        self._target = target
        self._open: set[asyncio.StreamWriter] = set()
        self._is_cut = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Breaks every connection and lets none through."""
        self._loop.call_soon_threadsafe(self._break)

    def mend(self) -> None:
        """Lets connections through again."""
        self._loop.call_soon_threadsafe(setattr, self, "_is_cut", False)

    def close(self) -> None:
        """Ends the relay and its thread."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._relay, "127.0.0.1", 0)

    async def _end(self) -> None:
        self._server.close()
        self._break()
        relays = asyncio.all_tasks() - {asyncio.current_task()}
        if relays:
            await asyncio.wait(relays, timeout=5)

    def _break(self) -> None:
        self._is_cut = True
        for writer in self._open:
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            if self._is_cut:
                return
            self._open.add(writer)
            with contextlib.suppress(OSError, LookupError):
                host, _, port = self._target().rpartition(":")
                far_reader, far_writer = await asyncio.open_connection(host, int(port))
                writers.append(far_writer)
                self._open.add(far_writer)
                await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        finally:
            for each in writers:
                self._open.discard(each)
                each.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()

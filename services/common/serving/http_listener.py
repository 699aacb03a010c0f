"""A port of an aiohttp application with bounded connections and bodies.

Promise: connections are bounded, in total and from one address, and a refused connection gets an answer with the
reason. A connection without a request is closed, and so is a connection whose client does not read its answer. A
`_Connection` between aiohttp's protocol and its transport notes the traffic, and a task checks all connections every
second. A port on loopback answers only requests whose Host is loopback or in HOSTS_VARIABLE, because a web page whose
name was rebound to loopback could read the answers in its visitor's browser.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import cast

from aiohttp import web

from paceline.calls.backoff import to_header
from paceline.calls.connection import is_loopback
from paceline.errors import USUAL_S, Busy, Conflict, InvalidInput
from paceline.rate_limited_log import SeldomFilter
from paceline.services.common.access.tls import server_context
from paceline.tls.folder import tls_folder

MAX_CONNECTIONS = 512
"""Largest number of connections to a port; bounded because the process needs files for other purposes."""
SHARE_OF_ADDRESS = 0.5
"""Share of the connections that one address may have, so that no address excludes all others."""
IDLE_S = 75.0
"""Seconds for which a connection may wait for its first or next request; a proxy keeps idle connections for a minute.
"""
UNREAD_S = 30.0
"""Seconds for which a client may leave its answer unread."""
CHECK_S = 1.0
MAX_BODY_BYTES = 8 << 20
MAX_BODIES = 16
"""Largest number of request bodies that are read at a time, because everyone who reaches the port can send them."""
BODY_S = 30.0
"""Seconds for a request's body to arrive."""
SHUTDOWN_S = 2.0
"""Seconds that answers in progress have when the listener closes; by then their sequences have ended."""
HTTP_LOG = "aiohttp.server"
"""Name of the logger for aiohttp's lines about requests that are not HTTP."""

HOSTS_VARIABLE = "PACELINE_HTTP_HOSTS"
"""Variable with further host names, separated by commas, under which clients reach ports on loopback, such as the name of
a proxy."""

seldom = SeldomFilter()
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def refusal_of_host(named: Sequence[str]) -> str:
    """Return why a port on loopback refuses a request with these Host headers; empty if the port accepts the
    request."""
    host = named[0].strip() if len(named) == 1 else ""
    name = (host if host.endswith("]") else host.rpartition(":")[0] or host).rstrip(".").lower()
    others = {each.strip().lower() for each in os.environ.get(HOSTS_VARIABLE, "").split(",")} - {""}
    if is_loopback(name) or name in others:
        return ""
    return (
        f"the request names the host {host[:80]!r}, but this port on loopback answers only for localhost and 127.0.0.1; if "
        f"clients reach it by another name, such as a proxy's, set {HOSTS_VARIABLE} to that name\n"
    )


class HttpListener:
    """Port of one aiohttp application, with limits."""

    def __init__(
        self,
        app: web.Application,
        name: str,
        remedy: str,
        *,
        max_connections: int | None = None,
        max_bodies: int | None = None,
        share_of_address: float | None = None,
        encrypted: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name` and `remedy` are for the message about a taken port; the limits default to those of this module. If `encrypted`
        is false, the port never uses TLS."""
        logging.getLogger(HTTP_LOG).addFilter(seldom)
        self._name, self._remedy, self._clock = name, remedy, clock
        self._limits = max_connections, max_bodies, share_of_address
        self._encrypted = encrypted
        self._connections: dict[asyncio.Protocol, _Connection] = {}
        self._of_address: Counter[str] = Counter()
        self._bodies = 0
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)

        @web.middleware
        async def note_request(request: web.Request, handler: Handler) -> web.StreamResponse:
            if self._is_loopback and (refusal := refusal_of_host(request.headers.getall("Host", []))):
                return web.Response(status=421, text=refusal)
            connection = self._connections.get(request.protocol)
            with connection.busy() if connection is not None else contextlib.nullcontext():
                return await handler(request)

        app.middlewares.insert(0, note_request)
        self._is_loopback = True
        self._listener: asyncio.Server | None = None
        self._checking: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def unread(self) -> int:
        """Return the number of connections whose client leaves its answer unread now."""
        return sum(connection.unread_s is not None for connection in self._connections.values())

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port, a free one for 0; with TLS if the environment names a folder with certificates.
        Raises Conflict if the port is taken, InvalidInput for certificates that cannot be used."""
        self._is_loopback = is_loopback(host)
        await self._runner.setup()
        try:
            folder = tls_folder() if self._encrypted else None
            context = server_context(folder) if folder is not None else None
            loop = asyncio.get_running_loop()
            self._listener = await loop.create_server(self._protocol, host, port, ssl=context)
        except OSError as error:
            await self._runner.cleanup()
            raise Conflict(f"{self._name} cannot listen on {host}:{port} ({error.strerror}); {self._remedy}") from None
        self._checking = asyncio.create_task(self._check_forever())
        return int(self._listener.sockets[0].getsockname()[1])

    @property
    def scheme(self) -> str:
        return "https" if self._encrypted and tls_folder() is not None else "http"

    async def close(self) -> None:
        """Accept no more requests; answers in progress are finished first."""
        if self._listener is not None:
            self._listener.close()
        if self._checking is not None:
            self._checking.cancel()
        await self._runner.cleanup()

    async def body(self, request: web.Request) -> bytes:
        """Return the body of a request. Raises InvalidInput if it does not arrive in time, Busy if too many bodies are
        being read."""
        if self._bodies >= (self._limits[1] or MAX_BODIES):
            raise Busy(f"{self._bodies} requests are being read; try again")
        self._bodies += 1
        try:
            async with asyncio.timeout(BODY_S):
                return await request.read()
        except TimeoutError:
            raise InvalidInput(f"the body did not come within {BODY_S:g} s") from None
        finally:
            self._bodies -= 1

    def check(self) -> None:
        """Close the connections without a request, and those whose client does not read."""
        now_s = self._clock()
        for connection in list(self._connections.values()):
            connection.check(now_s)

    async def _check_forever(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            self.check()

    def _protocol(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None
        return _Connection(self, server(), self._clock)

    def opened(self, connection: _Connection) -> str:
        """Register a connection; return the reason for a refusal, empty if the connection is accepted."""
        most = self._limits[0] or MAX_CONNECTIONS
        if len(self._connections) >= most:
            return f"{self._name} has {most} connections, the maximum; try again later"
        of_address = max(1, int((self._limits[2] or SHARE_OF_ADDRESS) * most))
        if self._of_address[connection.address] >= of_address:
            return (
                f"{self._name} has {of_address} connections from {connection.address}, the maximum from one address; close some, or "
                "try again later"
            )
        self._connections[connection.inner] = connection
        self._of_address[connection.address] += 1
        return ""

    def closed(self, connection: _Connection) -> None:
        if self._connections.pop(connection.inner, None) is not None:
            self._of_address[connection.address] -= 1
            if not self._of_address[connection.address]:
                del self._of_address[connection.address]


class _Connection(asyncio.Protocol):
    """A connection with aiohttp's protocol `inner`, which gets every event."""

    def __init__(self, listener: HttpListener, inner: asyncio.Protocol, clock: Callable[[], float]) -> None:
        self.inner = inner
        self.address = ""
        self._listener, self._clock = listener, clock
        self._transport: asyncio.Transport | None = None
        self._requests = 0
        self._quiet_s = clock()
        """Time, by `clock`, since which the connection has no request."""
        self.unread_s: float | None = None
        """Time, by `clock`, since which the client leaves its answer unread; None while it reads."""
        self._refused = False

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Count a request as in progress during the block."""
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1
            self._quiet_s = self._clock()

    def check(self, now_s: float) -> None:
        """Close the connection if it has no request, or if the client does not read."""
        transport = self._transport
        if transport is None:
            return
        if self.unread_s is not None and now_s - self.unread_s > UNREAD_S:
            transport.abort()
        elif not self._requests and now_s - self._quiet_s > IDLE_S:
            if transport.is_closing():  # aiohttp waits for the client to read the rest
                transport.abort()
            transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        if refusal := self._listener.opened(self):
            self._refused = True
            self._transport.write(_answer(refusal))
            transport.close()
            return
        self.inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._refused:
            self._listener.closed(self)
            self.inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._refused else self.inner.eof_received()

    def pause_writing(self) -> None:
        self.unread_s = self._clock()
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.unread_s = None
        self.inner.resume_writing()


def _answer(refusal: str) -> bytes:
    body = refusal.encode()
    head = ["HTTP/1.1 429 Too Many Requests", "Content-Type: text/plain; charset=utf-8", "Connection: close"]
    head += [f"{name}: {value}" for name, value in to_header(USUAL_S).items()]
    return "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body

"""JSON over HTTP for clients of the OpenAI API: a listener with limits, bodies, errors in the API's shape, and events.

Promise: whoever can reach the port takes a bounded number of connections, bodies and bytes, every error is answered to its
sender as the API's JSON, and no request ends the service.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from paceline.chat.api_errors import RETRY_AFTER_S, error_answer, error_body
from paceline.chat.messages import Json
from paceline.errors import Busy, Conflict, InvalidInput, PacelineError
from paceline.rate_limited_log import unforeseen
from paceline.tls.folder import tls_folder
from services.common.tls import server_context

MAX_BODY_BYTES = 8 << 20
MAX_BODIES = 16
"""Request bodies that are read at a time, because everyone who can reach the port can send them."""

BODY_S = 30.0
"""Seconds for a body to arrive."""

MAX_CONNECTIONS = 512
"""Connections; a further connection is closed at once, because the worker needs files for other things."""

SHUTDOWN_S = 2.0
"""Seconds that answers under way have when the listener closes; by then their sequences have ended."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class JsonListener:
    """A port with routes."""

    def __init__(
        self, name: str, remedy: str, *, max_connections: int | None = None, max_bodies: int | None = None
    ) -> None:
        """`name` and `remedy` are for the message about a taken port; the limits are those of this module by default."""
        self.app = web.Application(middlewares=[_with_errors], client_max_size=MAX_BODY_BYTES)
        self._name, self._remedy = name, remedy
        self._max_connections, self._max_bodies = max_connections, max_bodies
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._bodies = 0

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port, 0 takes a free one; with TLS where the environment names a folder with certificates. Raises
        Conflict when the port is taken, InvalidInput for certificates that cannot be used."""
        self._runner = web.AppRunner(
            self.app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S
        )
        await self._runner.setup()
        try:
            folder = tls_folder()
            context = server_context(folder) if folder is not None else None
            loop = asyncio.get_running_loop()
            self._listener = await loop.create_server(self._protocol, host, port, ssl=context)
        except OSError as error:
            await self._runner.cleanup()
            raise Conflict(
                f"{self._name} cannot listen on {host}:{port} ({error.strerror}); {self._remedy}"
            ) from None
        return int(self._listener.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Take no more requests; answers under way are finished first."""
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def body(self, request: web.Request) -> Any:
        """Return the document in a request. Raises InvalidInput where there is none, Busy beyond the limit."""
        # A web page can make a browser post text to a local port, but not JSON, which needs this server's consent.
        if request.content_type != "application/json":
            raise InvalidInput(f"the content type is {request.content_type!r}, must be 'application/json'")
        if self._bodies >= (self._max_bodies or MAX_BODIES):
            raise Busy(f"{self._bodies} requests are being read; try again")
        self._bodies += 1
        try:
            async with asyncio.timeout(BODY_S):
                content = await request.read()
        except TimeoutError:
            raise InvalidInput(f"the body did not come within {BODY_S:g} s") from None
        finally:
            self._bodies -= 1
        try:
            return json.loads(content)
        except ValueError as error:
            raise InvalidInput(f"the body is no JSON: {error}") from None
        except RecursionError:
            raise InvalidInput("the body is nested too deeply") from None

    def _protocol(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        assert self._runner is not None
        server = self._runner.server
        assert server is not None
        full = len(server.connections) >= (self._max_connections or MAX_CONNECTIONS)
        return _Full() if full else server()


class _Full(asyncio.Protocol):
    """Protocol of a connection beyond the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it."""
        transport.close()


def event_stream() -> web.StreamResponse:
    """Return a response of server-sent events, which is not prepared yet."""
    return web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )


async def send_event(response: web.StreamResponse, event: Json, name: str = "") -> None:
    """Send one event."""
    head = f"event: {name}\n".encode() if name else b""
    await response.write(head + b"data: " + json.dumps(event, allow_nan=False).encode() + b"\n\n")


@web.middleware
async def _with_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error as the API's JSON."""
    try:
        return await handler(request)
    except PacelineError as error:
        status, body = error_answer(error)
        headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else None
        return web.json_response(body, status=status, headers=headers)
    except web.HTTPException as error:
        message = f"{request.method} {request.path}: {error.reason}; see /v1/models for what is here"
        return web.json_response(error_body(message, "invalid_request_error"), status=error.status)
    except Exception as error:  # any error is answered to its sender, and others are served on
        message = unforeseen.note(f"an HTTP {request.method}", error)
        return web.json_response(error_body(message, "server_error"), status=500)

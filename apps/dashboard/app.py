"""The dashboard's HTTP server: the page's files, the REST interface, and headers that keep hostile text from running.

The content security policy allows scripts, styles and connections from this server alone, and none inline, so a text that reached
the page as markup by a fault would still not run. The page's files are open to everyone; what they show needs a key.
"""

from __future__ import annotations

import json
from pathlib import Path

from aiohttp import web

from paceline.apps.dashboard.gateway import Gateway, error_body, retry_header
from paceline.apps.dashboard.openapi import document
from paceline.apps.dashboard.pieces import Pieces
from paceline.errors import InvalidInput, NotFound
from paceline.services.common.serving.http_listener import MAX_BODY_BYTES, Handler, HttpListener

STATIC = Path(__file__).parent / "static"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Dashboard:
    """The server of one backend."""

    def __init__(self, gateway: Gateway, pieces: Pieces):
        self._gateway = gateway
        self._pieces = pieces
        self.app = web.Application(middlewares=[_with_errors], client_max_size=MAX_BODY_BYTES)
        self._listener = HttpListener(self.app, "the dashboard", "choose another --port, or 0 for a free one")
        self.app.on_response_prepare.append(_add_headers)
        self.app.router.add_get("/", self._index)
        self.app.router.add_get("/openapi.json", self._openapi)
        self.app.router.add_get("/session", self._session)
        self.app.router.add_post("/tokens", self._tokens)
        self.app.router.add_static("/static", STATIC)
        self.app.router.add_post("/{service}/{method}", self._call)

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port; 0 takes a free one. Raises Conflict when the port is taken."""
        return await self._listener.start(host, port)

    async def close(self) -> None:
        """Take no more requests; answers under way have two seconds."""
        await self._listener.close()
        self._pieces.close()

    async def _index(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(STATIC / "index.html")

    async def _openapi(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(document())

    async def _session(self, request: web.Request) -> web.StreamResponse:
        """Say what the caller may do."""
        return web.json_response({"role": (await self._gateway.role(request)).name.lower()})

    async def _call(self, request: web.Request) -> web.StreamResponse:
        return await self._gateway.answer(request, self._listener.body)

    async def _tokens(self, request: web.Request) -> web.StreamResponse:
        """Answer {runId, ids} with the text of each token, or null where the tokenizer is not on this machine."""
        await self._gateway.role(request)
        try:
            body = json.loads(await self._listener.body(request))
        except RecursionError:
            raise InvalidInput("the body is nested too deeply") from None
        except ValueError as error:
            raise InvalidInput(f"the body is no JSON: {error}") from None
        if not isinstance(body, dict):
            raise InvalidInput("the body has to be an object with runId and ids")
        try:
            texts = await self._pieces.texts(body.get("runId"), body.get("ids"))
        except NotFound as missing:  # no error for a browser's console: the view shows numbers then
            return web.json_response({"texts": None, "message": str(missing)})
        return web.json_response({"texts": texts})


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)


@web.middleware
async def _with_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error with its code and message."""
    try:
        return await handler(request)
    except web.HTTPRedirection:
        raise
    except Exception as error:  # any error is answered to its sender, and others are served on
        status, body = error_body(error)
        return web.json_response(body, status=status, headers=retry_header(error))

"""Serves the dashboard over HTTP: the page, the REST interface, and headers that keep hostile text from running.

The content security policy allows scripts, styles and connections from this server only, and nothing inline: text that
a bug turned into markup would still not run. Everyone may read the page's files; the records need a key.

A thread loads tokenizers at their first use, only from folders on this machine, so the page works without the internet;
without a tokenizer it shows token ids as numbers.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web

from paceline.apps.dashboard.backends import Backend, document, methods
from paceline.apps.dashboard.gateway import Gateway, error_body, retry_header
from paceline.data.tokens import load_tokenizer
from paceline.errors import InvalidInput, NotFound, PacelineError
from paceline.services.common.serving.http_listener import MAX_BODY_BYTES, Handler, HttpListener
from paceline.spec.reading import spec_of_run
from paceline.v1 import records_pb2

STATIC = Path(__file__).parent / "static"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Dashboard:
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
        """Listen, and return the port. Port 0 takes a free one. Raises Conflict if the port is taken."""
        return await self._listener.start(host, port)

    async def close(self) -> None:
        """Accept no more requests, and wait at most two seconds for those in progress."""
        await self._listener.close()
        self._pieces.close()

    async def _index(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(STATIC / "index.html")

    async def _openapi(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(document())

    async def _session(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"role": (await self._gateway.role(request)).name.lower()})

    async def _call(self, request: web.Request) -> web.StreamResponse:
        return await self._gateway.answer(request, self._listener.body)

    async def _tokens(self, request: web.Request) -> web.StreamResponse:
        """Answer {runId, ids} with the text of each token, or with null if the tokenizer is not on this machine."""
        await self._gateway.role(request)
        try:
            body = json.loads(await self._listener.body(request))
        except RecursionError:
            raise InvalidInput("the body is nested too deeply") from None
        except ValueError as error:
            raise InvalidInput(f"the body is not valid JSON: {error}") from None
        if not isinstance(body, dict):
            raise InvalidInput("the body must be an object with runId and ids")
        try:
            texts = await self._pieces.texts(body.get("runId"), body.get("ids"))
        except NotFound as missing:  # an error would be logged in the browser's console; the view shows numbers instead
            return web.json_response({"texts": None, "message": str(missing)})
        return web.json_response({"texts": texts})


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)


@web.middleware
async def _with_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPRedirection:
        raise
    except Exception as error:  # any error goes to its caller only; other requests are served
        status, body = error_body(error)
        return web.json_response(body, status=status, headers=retry_header(error))


MAX_IDS = 65_536
TOKENIZERS = 4
LARGEST_ID = (1 << 31) - 1


class Pieces:
    def __init__(self, backend: Backend):
        self._backend = backend
        self._thread = ThreadPoolExecutor(1, "tokenizers")
        self._tokenizers: dict[str, Any] = {}

    async def texts(self, run_id: Any, ids: Any) -> list[str]:
        """Return the text of each token. Raises InvalidInput, or NotFound if the tokenizer is not on this machine."""
        if not isinstance(run_id, str) or not isinstance(ids, list) or len(ids) > MAX_IDS:
            raise InvalidInput(f"send runId, a text, and ids, a list of at most {MAX_IDS} numbers")
        if not all(isinstance(each, int) and 0 <= each <= LARGEST_ID for each in ids):
            raise InvalidInput("ids must be token ids: numbers from 0")
        method = methods()["paceline.v1.RecordsService/GetSpec"]
        answer = await self._backend.call(method, records_pb2.GetSpecRequest(run_id=run_id))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._texts, run_id, answer.spec_yaml, ids)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _texts(self, run_id: str, spec_yaml: str, ids: Sequence[int]) -> list[str]:
        policy = spec_of_run(run_id, spec_yaml)[0].policy
        name = policy.tokenizer_name or policy.model_name
        if not os.path.isdir(name):
            raise NotFound(f"the tokenizer {name} is not in a folder on this machine")
        if name not in self._tokenizers:
            while len(self._tokenizers) >= TOKENIZERS:
                self._tokenizers.pop(next(iter(self._tokenizers)))
            self._tokenizers[name] = load_tokenizer(policy)
        try:
            tokenizer = self._tokenizers[name]
            return [str(tokenizer.decode([each])) for each in ids]
        except PacelineError:
            raise
        except Exception as error:  # the tokenizer has no such id
            raise InvalidInput(f"the tokenizer cannot decode these tokens: {error}") from None

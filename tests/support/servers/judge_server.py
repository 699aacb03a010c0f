"""A real HTTP server that answers as a judge does, or as one that is broken: it hangs, refuses, talks nonsense, limits the rate,
cuts the connection."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

Behaviour = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def says(content: Any, prompt_tokens: int = 100, completion_tokens: int = 10) -> Behaviour:
    """A chat completion; what is no text is written as JSON."""
    text = content if isinstance(content, str) else json.dumps(content)

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
        return web.json_response({"choices": [{"message": {"content": text}}], "usage": usage})

    return answer


def by_body(choose: Callable[[dict[str, Any]], Any]) -> Behaviour:
    """A chat completion with what `choose` returns for the request."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await says(choose(body))(request, body)

    return answer


def status(code: int, message: str = "no", **headers: str) -> Behaviour:
    """An error as OpenAI's services give it."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response({"error": {"message": message}}, status=code, headers=named)

    return answer


def raw(content: bytes) -> Behaviour:
    """Status 200 with these bytes."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=content, content_type="application/json")

    return answer


async def drops(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """The server dies in the middle of its answer."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices"')
    assert request.transport is not None
    request.transport.abort()
    return response


class JudgeServer:
    """A server on a free port of loopback; an async context manager."""

    def __init__(self, default: Behaviour) -> None:
        self.default = default
        self.script: deque[Behaviour] = deque()
        """Behaviours of the next requests, before the default."""
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.released = asyncio.Event()
        """Ends what hangs."""
        self.most_at_once = 0
        self._at_once = 0

    async def hangs(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """No answer until `released`."""
        await self.released.wait()
        return web.Response(status=500)

    async def __aenter__(self) -> JudgeServer:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/{route:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.released.set()
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def endpoint(self, **changes: Any) -> dict[str, Any]:
        """Settings of the endpoint, without pauses between attempts."""
        return {"base_url": self.url, "model": "judge", "first_backoff_s": 0.0, **changes}

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append({**body, "route": request.match_info["route"]})
        self.keys.append(request.headers.get("Authorization", ""))
        behaviour = self.script.popleft() if self.script else self.default
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return await behaviour(request, body)
        finally:
            self._at_once -= 1

"""The HTTP targets of messages: the endpoint of rollout workers and of the model server, the page's interface, `/metrics`; and the
port at which a host's agent is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import aiohttp
from google.protobuf import json_format
from messages import Known, Maker
from targets import CALL_S, ORDERS, STREAM_S

from paceline.apps.dashboard.backends import methods
from paceline.v1 import host_agent_pb2
from paceline.weights.hosts import frames

READ_BYTES = 1 << 16
"""Bytes of an answer that are read."""

ITEMS = ("message", "reasoning", "function_call", "function_call_output", "x")
"""Types of items of a response's input."""


class Http:
    """Requests to every route of a rollout worker's endpoint, and to some that it does not have."""

    def __init__(self, address: str, seed: int | str):
        self._maker = Maker(seed, {})
        self._base = f"http://{address}"
        self._session: aiohttp.ClientSession | None = None
        self.sent = 0

    async def send_one(self) -> None:
        """One request."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_S))
        self.sent += 1
        dice = self._maker.random
        path = dice.choice(
            [
                "/v1/models",
                f"/v1/models/{dice.randrange(99)}",
                "/v1/chat/completions",
                "/v1/completions",
                "/v1/responses",
                "/inference/v1/generate",
                "/generate",
                "/x",
            ]
        )
        asks = path.endswith(("completions", "responses", "generate"))
        verb = "POST" if asks and dice.random() < 0.9 else dice.choice(["GET", "POST", "PUT"])
        headers = {"Content-Type": "application/json"} if dice.random() < 0.9 else {}
        body = self._maker.damaged(json.dumps(self._body()).encode(errors="replace"))
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
            async with self._session.request(verb, self._base + path, data=body, headers=headers) as response:
                await response.content.read(READ_BYTES)

    async def close(self) -> None:
        """Ends the connections."""
        if self._session is not None:
            await self._session.close()

    def _object(self) -> dict[str, Any]:
        made = self._maker.json()
        return made if isinstance(made, dict) else {"role": "assistant", "call_id": "c", "name": "f", "content": made}

    def _body(self) -> Any:
        dice, anything = self._maker.random, self._maker.json
        if dice.random() < 0.2:
            return anything()
        body: dict[str, Any] = {"model": dice.choice(["policy", anything()]), "max_tokens": 2}
        body["messages"] = [{"role": dice.choice(["user", "tool", anything()]), "content": anything()}]
        body["prompt"] = dice.choice(["07+45=", [1, 2, 3], anything()])
        body["input"] = dice.choice(["07+45=", [{"type": dice.choice(ITEMS), **self._object()}], anything()])
        body["token_ids"] = dice.choice([[1, 2, 3], anything()])
        if dice.random() < 0.5:
            kept = dice.choice(["messages", "prompt", "input", "token_ids"])
            body = {name: body[name] for name in ("model", "max_tokens", kept)}
        for name in (
            "n",
            "stream",
            "temperature",
            "top_p",
            "stop",
            "logprobs",
            "seed",
            "max_tokens",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "reasoning_effort",
            "chat_template_kwargs",
            "sampling_params",
            "instructions",
            "text",
            "x",
        ):
            if dice.random() < 0.2:
                body[name] = anything()
        return body


class Page:
    """Requests to every call of the page's interface, and to paths that it does not have."""

    def __init__(self, address: str, seed: int | str, known: Known, token: str):
        self._maker = Maker(seed, known)
        self._base, self._token = f"http://{address}", token
        self._methods = list(methods().values())
        self._session: aiohttp.ClientSession | None = None
        self.sent = 0

    async def send_one(self) -> None:
        """One request."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_S))
        dice, method = self._maker.random, self._methods[self.sent % len(self._methods)]
        self.sent += 1
        if dice.random() < 0.8:
            verb, path = "POST", method.path
            made = self._maker.message(method.request.DESCRIPTOR)
            with contextlib.suppress(json_format.SerializeToJsonError, ValueError):
                made = json_format.MessageToJson(made)
            body = made.encode(errors="replace") if isinstance(made, str) else b"{}"
        else:
            verb = dice.choice(["GET", "POST", "PUT", "HEAD"])
            path = dice.choice(["", "openapi.json", "session", "tokens", "static/../app.py", "a.B/C", "x", "%2e%2e"])
            body = json.dumps(self._maker.json()).encode(errors="replace")
        headers = {"Content-Type": "application/json"} if dice.random() < 0.95 else {}
        is_order = path.rpartition("/")[2] in ORDERS
        if not is_order and dice.random() < 0.7:
            headers["Authorization"] = f"Bearer {self._token}"
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
            async with self._session.request(
                verb, f"{self._base}/{path}", data=self._maker.damaged(body), headers=headers
            ) as response:
                async with asyncio.timeout(STREAM_S):
                    await response.content.read(READ_BYTES)

    async def close(self) -> None:
        """Ends the connections."""
        if self._session is not None:
            await self._session.close()


HOSTS = ("localhost",) * 6 + ("127.0.0.1:1", "[::1", "evil.example", "", "localhost, evil.example", ":" * 99)


class Metrics:
    """Requests to a metrics port: of its one path, of others, and of none."""

    def __init__(self, address: str, seed: int | str):
        self._maker, self._address = Maker(seed, {}), address
        self.sent = 0

    async def send_one(self) -> None:
        """One connection with one request, which may be no HTTP."""
        self.sent += 1
        dice = self._maker.random
        request = self._maker.damaged(
            f"{dice.choice(['GET', 'POST', 'X'])} {dice.choice(['/metrics', '/', '/../x', '/scale/x'])} HTTP/1.1\r\n"
            f"Host: {dice.choice(HOSTS)}\r\n{dice.choice(['', 'Transfer-Encoding: chunked', 'Content-Length: -1'])}\r\n\r\n".encode()
        )
        await _say(self._address, request)

    async def close(self) -> None:
        """Nothing stays open."""


class AgentReaders:
    """Readers of a host's agent that know no secret of a run."""

    def __init__(self, address: str, seed: int | str, known: Known):
        self._maker, self._address = Maker(seed, known), address
        self.sent = 0

    async def send_one(self) -> None:
        """One connection with one request, whose length may be a lie."""
        self.sent += 1
        data = self._maker.bytes_of(host_agent_pb2.ReadRequest.DESCRIPTOR)
        length = self._maker.random.choice([len(data)] * 3 + [0, frames.MAX_MESSAGE_BYTES, 2**32 - 1])
        await _say(self._address, frames.LENGTH.pack(length) + data)

    async def close(self) -> None:
        """Nothing stays open."""


async def _say(address: str, data: bytes) -> None:
    """Send bytes on a connection of their own, read a little, and leave."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(STREAM_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(data)
                await writer.drain()
                await reader.read(READ_BYTES)
            finally:
                writer.transport.abort()

"""Connections of an HTTP port are bounded by address, and idle or unread ones are closed."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from paceline.services.common.serving.http_listener import HOSTS_VARIABLE, IDLE_S, UNREAD_S, HttpListener

WAIT_S = 60.0
BIG = b"x" * (32 << 20)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class World:
    """A port, its clock, and a handler that waits for `go`."""

    def __init__(self) -> None:
        self.clock, self.go, self.entered = Clock(), asyncio.Event(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/", self._answer)
        app.router.add_get("/big", self._big)
        app.router.add_get("/wait", self._wait)
        self.listener = HttpListener(
            app, "the test", "choose another", max_connections=4, share_of_address=0.5, clock=self.clock
        )
        self.port = 0

    async def _answer(self, _: web.Request) -> web.Response:
        return web.Response(text="here")

    async def _big(self, _: web.Request) -> web.Response:
        return web.Response(body=BIG)

    async def _wait(self, _: web.Request) -> web.Response:
        self.entered.set()
        await self.go.wait()
        return web.Response(text="late")

    async def until(self, number: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.listener) != number:  # noqa: ASYNC110 - the server notices in its own time
                await asyncio.sleep(0.01)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    made.port = await made.listener.start("127.0.0.1", 0)
    yield made
    made.go.set()
    await made.listener.close()


async def test_one_address_has_a_share_of_the_connections(world: World) -> None:
    held = [await world.connect() for _ in range(2)]
    await world.until(2)
    reader, writer = await world.connect()
    answer = (await asyncio.wait_for(reader.read(), WAIT_S)).decode()
    assert answer.startswith("HTTP/1.1 429 Too Many Requests\r\n")
    assert "Retry-After: 1\r\n" in answer
    assert answer.endswith(
        "the test has 2 connections from 127.0.0.1, the maximum from one address; close some, or try again later"
    )
    writer.close()
    held[0][1].close()
    await world.until(1)
    async with aiohttp.ClientSession() as client, client.get(f"http://127.0.0.1:{world.port}/") as found:
        assert await found.text() == "here"
    held[1][1].close()


async def test_a_connection_without_a_whole_request_is_closed(world: World) -> None:
    (_, silent), (_, slow) = await world.connect(), await world.connect()
    slow.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
    await world.until(2)
    world.clock.now_s = IDLE_S
    world.listener.check()
    assert len(world.listener) == 2
    slow.write(b"1")  # one more byte does not help
    world.clock.now_s = IDLE_S + 1
    world.listener.check()
    await world.until(0)
    silent.close()
    slow.close()


async def test_a_request_under_way_is_not_idle(world: World) -> None:
    reader, writer = await world.connect()
    writer.write(b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await asyncio.wait_for(world.entered.wait(), WAIT_S)
    world.clock.now_s = 100 * IDLE_S
    world.listener.check()
    world.go.set()
    assert (await asyncio.wait_for(reader.readuntil(b"late"), WAIT_S)).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_an_answer_that_nobody_reads_ends_its_connection(world: World) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await loop.sock_connect(client, ("127.0.0.1", world.port))
        await loop.sock_sendall(client, b"GET /big HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await loop.sock_recv(client, 100)  # the answer has begun, and fills the buffers
        async with asyncio.timeout(WAIT_S):
            while not world.listener.unread:  # noqa: ASYNC110 - the server notices in its own time
                await asyncio.sleep(0.01)
        world.clock.now_s = UNREAD_S
        world.listener.check()
        assert len(world.listener) == 1
        world.clock.now_s = UNREAD_S + 1
        world.listener.check()
        await world.until(0)


@pytest.mark.parametrize(
    ("host", "accepted"),
    [
        *((each, True) for each in ("localhost", "LOCALHOST:80", "localhost.:1", "127.0.0.1", "127.9.9.9:8", "[::1]", "[::1]:9")),
        *((each, True) for each in ("proxy.example", "Proxy.Example:443")),
        *((each, False) for each in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example:1")),
        *((each, False) for each in ("", "0.0.0.0", "10.0.0.1:80", "[2001:db8::1]:80", "evil.example\r\nHost: localhost", None)),
    ],
)  # fmt: skip
async def test_a_port_on_loopback_answers_only_for_loopback_and_configured_names(
    world: World, monkeypatch: pytest.MonkeyPatch, host: str | None, accepted: bool
) -> None:
    monkeypatch.setenv(HOSTS_VARIABLE, "other.example, proxy.example")
    reader, writer = await world.connect()
    head = "" if host is None else f"Host: {host}\r\n"
    writer.write(f"GET / HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode())
    async with asyncio.timeout(WAIT_S):
        answer = (await reader.read()).decode()
    writer.close()
    assert answer.split()[1] in (("200",) if accepted else ("421", "400"))
    assert answer.endswith("here") == accepted


def test_every_http_port_is_of_the_one_listener() -> None:
    root = Path(__file__).parents[4]
    folders = ("services", "apps", "environment", "reward", "rollout", "weights", "paceline", "learner")
    makers = {
        path.name
        for folder in folders
        for path in root.joinpath(folder).rglob("*.py")
        if re.search(r"web\.AppRunner\(|http\.server|HTTPServer|uvicorn|start_http_server", path.read_text())
    }
    assert makers == {"http_listener.py"}

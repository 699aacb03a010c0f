"""Tokens at HTTP ports: answered requests at a port that requires one, and at one that does not."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import ClientSession, web

from paceline.errors import AccessDenied
from paceline.rate_limited_log import RateLimitedLog
from paceline.services.common.access.rights import METRICS, Caller, CallerRole
from paceline.services.common.access.token_guard import Call
from paceline.services.common.serving import json_http
from paceline.services.common.serving.json_http import HttpGuard, JsonListener, needs_token
from paceline.tls.folder import VARIABLE

ROLES = {"prometheus": CallerRole.SCRAPER, "pool": CallerRole.WORKER}


class Callers:
    """Two callers; the token of each is its name."""

    async def caller(self, token: str, certificate: str = "") -> Caller:
        if token not in ROLES:
            raise AccessDenied("the call has another token")
        return Caller(token, frozenset({ROLES[token]}))


@pytest.fixture
def noted() -> list[Call]:
    """Refused requests."""
    return []


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch, noted: list[Call]) -> AsyncIterator[int]:
    """A port for scrapers that requires a token."""
    monkeypatch.setattr(json_http, "needs_token", lambda host: True)
    guard = HttpGuard(Callers(), METRICS, RateLimitedLog(logging.getLogger(__name__)), noted.append)
    listener = JsonListener("a test", "choose another port", guard=guard)

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="numbers")

    listener.app.router.add_get("/metrics", answer)
    yield await listener.start("127.0.0.1", 0)
    await listener.close()


@pytest.mark.parametrize(
    ("header", "status", "said"),
    [
        ("Bearer prometheus", 200, "numbers"),
        ("Bearer pool", 403, "is for the roles viewer, submitter, operator, scraper; pool has worker"),
        ("Bearer nobody", 401, "another token"),
        ("Basic prometheus", 401, "paceline token create"),
        ("Bearer " + "x" * 600, 401, "paceline token create"),
        (None, 401, "paceline token create"),
    ],
)
async def test_a_port_answers_callers_with_a_role_alone(
    port: int,
    header: str | None,
    status: int,
    said: str,
    noted: list[Call],
    caplog: pytest.LogCaptureFixture,
) -> None:
    headers = {} if header is None else {"Authorization": header}
    async with (
        ClientSession(headers=headers) as client,
        client.get(f"http://127.0.0.1:{port}/metrics") as answer,
    ):
        assert answer.status == status
        assert said in await answer.text()
        assert ("WWW-Authenticate" in answer.headers) == (status == 401)
    assert ("refused an HTTP request from 127.0.0.1" in caplog.text) == (status != 200)
    wanted = {200: [], 401: ["UNAUTHENTICATED"], 403: ["PERMISSION_DENIED"]}[status]
    assert [(call.method, call.peer, call.code.name) for call in noted] == [
        ("http/metrics", "127.0.0.1", code) for code in wanted
    ]


def test_a_token_is_required_under_tls_beyond_this_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not needs_token("10.0.0.1")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert needs_token("10.0.0.1")
    assert needs_token("0.0.0.0")
    assert not needs_token("127.0.0.1")

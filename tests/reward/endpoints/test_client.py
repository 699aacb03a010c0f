"""The client against a real server in every bad mood."""

from __future__ import annotations

import asyncio
import email.utils
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from judge_server import JudgeServer, drops, raw, says, status

from paceline.reward.endpoints.client import (
    BadAnswer,
    Endpoint,
    EndpointUnavailable,
    RequestRefused,
    _seconds,
)
from paceline.reward.endpoints.settings import EndpointSettings

SECRET = "sk-live-0123456789abcdef"


@pytest.fixture
async def server() -> AsyncIterator[JudgeServer]:
    async with JudgeServer(says("hello")) as started:
        yield started


async def post(server: JudgeServer, counts: Counter[str] | None = None, **changes: Any) -> dict[str, Any]:
    counts = Counter() if counts is None else counts

    def count(name: str, value: float) -> None:
        counts[name] += int(value)

    settings = EndpointSettings(**server.endpoint(**changes))
    async with asyncio.timeout(60), Endpoint(settings, count) as endpoint:
        return await endpoint.post("chat/completions", {"model": "judge", "seed": 1})


async def test_what_passes_is_tried_again(server: JudgeServer) -> None:
    server.script.extend([status(429, Retry_After="0"), status(503), drops])
    counts: Counter[str] = Counter()
    answer = await post(server, counts)
    assert answer["choices"][0]["message"]["content"] == "hello"
    assert counts == {"requests": 4, "failed": 3}


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
async def test_after_all_attempts_the_service_is_unavailable(server: JudgeServer, code: int) -> None:
    server.default = status(code, "too busy")
    with pytest.raises(EndpointUnavailable, match=rf"answered {code}: too busy \(attempt 3 of 3\)"):
        await post(server, attempts=3)
    assert len(server.bodies) == 3


async def test_a_service_that_hangs_is_unavailable(server: JudgeServer) -> None:
    server.default = server.hangs
    with pytest.raises(EndpointUnavailable, match=r"did not answer within 1 s"):
        await post(server, attempts=2, request_timeout_s=1.0)
    assert len(server.bodies) == 2


async def test_a_service_that_is_not_there_is_unavailable(server: JudgeServer) -> None:
    with pytest.raises(EndpointUnavailable, match="cannot be reached"):
        await post(server, base_url="http://127.0.0.1:1/v1", attempts=2)


@pytest.mark.parametrize("code", [401, 403, 404, 307])
async def test_a_wrong_key_or_url_is_unavailable_at_once(server: JudgeServer, code: int) -> None:
    server.default = status(code, Location="http://127.0.0.1:1/elsewhere")
    with pytest.raises(EndpointUnavailable, match="check base_url, model and the key"):
        await post(server)
    assert len(server.bodies) == 1


@pytest.mark.parametrize("code", [400, 413, 422])
async def test_a_refused_request_is_not_repeated(server: JudgeServer, code: int) -> None:
    server.default = status(code, "too long")
    with pytest.raises(RequestRefused, match=f"answered {code}: too long"):
        await post(server)
    assert len(server.bodies) == 1


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[1]", b"{", b"[" * 100_000, b" " * (9 << 20)])
async def test_nonsense_is_a_bad_answer(server: JudgeServer, content: bytes) -> None:
    server.default = raw(content)
    with pytest.raises(BadAnswer, match="the answer"):
        await post(server)


async def test_further_fields_win_and_null_removes(server: JudgeServer) -> None:
    await post(server, extra_body={"seed": None, "top_k": 3})
    assert server.bodies == [{"model": "judge", "top_k": 3, "route": "chat/completions"}]


@pytest.mark.parametrize("code", [400, 401, 500])
async def test_the_key_is_sent_and_never_shown(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("JUDGE_API_KEY", SECRET)
    server.default = status(code, f"Incorrect key {SECRET} (also sk-live-0123***cdef)")
    with pytest.raises((EndpointUnavailable, RequestRefused), match="Incorrect key …") as caught:
        await post(server, api_key_env="JUDGE_API_KEY", attempts=1)
    assert server.keys == [f"Bearer {SECRET}"]
    assert "0123" not in f"{caught.value!r} {caught.value.__context__!r} {caplog.text}"


async def test_a_key_that_is_gone_makes_the_service_unavailable(server: JudgeServer) -> None:
    with pytest.raises(EndpointUnavailable, match="GONE_API_KEY holds no key"):
        await post(server, api_key_env="GONE_API_KEY")


async def test_the_pools_slots_are_divided(server: JudgeServer) -> None:
    settings = EndpointSettings(**server.endpoint(max_concurrency=6))
    async with Endpoint(settings, lambda name, value: None, num_processes=3) as endpoint:
        await asyncio.gather(*(endpoint.post("chat/completions", {}) for _ in range(20)))
    assert len(server.bodies) == 20
    assert server.most_at_once <= 2


@pytest.mark.parametrize(
    ("header", "seconds"), [("3", 3.0), ("", 0.0), ("soon", 0.0), ("-1", 0.0), ("9" * 30, 999_999_999.0)]
)
def test_seconds_of_retry_after(header: str, seconds: float) -> None:
    assert _seconds(header) == seconds


def test_retry_after_as_a_date() -> None:
    assert 50 < _seconds(email.utils.formatdate(time.time() + 60, usegmt=True)) <= 60

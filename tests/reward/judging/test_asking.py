"""A judge in every bad mood: attempts, None or a pause as the spec says, and never a number by accident."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from judge_server import JudgeServer, by_body, drops, raw, says, status

from paceline.reward.endpoints.cache import AnswerCache
from paceline.reward.endpoints.client import Endpoint, EndpointUnavailable, RequestRefused
from paceline.reward.judging import asking
from paceline.reward.judging.asking import Panel, deadline_of
from paceline.reward.judging.settings import ScoreSettings, messages
from paceline.reward.judging.verdicts import Verdict, score_verdict

SCHEMA = {"score": {"type": "number"}}
GOOD = says({"reasoning": "fine", "score": 7})


@pytest.fixture
async def server() -> AsyncIterator[JudgeServer]:
    asking._without_schema.clear()
    async with JudgeServer(GOOD) as started:
        yield started


class Asker:
    """Asks questions as one call of a reward function does."""

    def __init__(self, server: JudgeServer, folder: Path) -> None:
        self._server, self._folder = server, folder
        self.counts: Counter[str] = Counter()

    def _count(self, name: str, value: float) -> None:
        self.counts[name] += value  # type: ignore[assignment]

    async def __call__(
        self, *questions: str, deadline_s: float = 30.0, endpoint: Any = None, **settings: Any
    ) -> list[list[float]]:
        chosen = ScoreSettings(endpoint=self._server.endpoint(**(endpoint or {})), rubric="Be right.", **settings)
        cache = AnswerCache(self._folder, 1 << 26)
        try:
            async with asyncio.timeout(60), Endpoint(chosen.endpoint, self._count) as connected:
                panel = Panel(chosen, connected, cache, self._count, SCHEMA)
                found = await panel.votes([messages("s", q) for q in questions], parse, deadline_s)
        finally:
            cache.close()
        return [[verdict.value for verdict in given] for given in found]


def parse(text: str) -> Verdict | None:
    return score_verdict(text, 1, 10)


@pytest.fixture
def ask(server: JudgeServer, tmp_path: Path) -> Asker:
    return Asker(server, tmp_path)


async def test_every_vote_is_a_request_with_a_seed_of_its_own(server: JudgeServer, ask: Asker) -> None:
    assert await ask("a", "b", votes=3, seed=5) == [[7, 7, 7], [7, 7, 7]]
    assert Counter(body["seed"] for body in server.bodies) == {5: 2, 6: 2, 7: 2}
    assert {body["temperature"] for body in server.bodies} == {0.7}
    schema = server.bodies[0]["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["reasoning", "score"]
    assert ask.counts == {"requests": 6, "prompt_tokens": 600, "completion_tokens": 60, "cost": 0}


async def test_prices_are_by_a_million_tokens(ask: Asker) -> None:
    await ask("a", endpoint={"prompt_price": 2.0, "completion_price": 30.0})
    assert ask.counts["cost"] == pytest.approx((100 * 2 + 10 * 30) / 1e6)


async def test_a_second_run_is_free(server: JudgeServer, ask: Asker) -> None:
    first = await ask("a", "b", votes=2)
    requests = len(server.bodies)
    server.default = status(500)
    assert await ask("a", "b", votes=2) == first
    assert len(server.bodies) == requests
    assert ask.counts["cached"] == 4


@pytest.mark.parametrize(
    "other", [{"max_tokens": 7}, {"seed": 9}, {"temperature": 0.5}, {"endpoint": {"extra_body": {"top_k": 1}}},
              {"endpoint": {"model": "other"}}, {"endpoint": {"cache": False}}]
)  # fmt: skip
async def test_another_question_is_asked(server: JudgeServer, ask: Asker, other: dict[str, Any]) -> None:
    await ask("a")
    await ask("a", **other)
    assert len(server.bodies) == 2


async def test_equal_questions_share_a_request(server: JudgeServer, ask: Asker) -> None:
    assert await ask("a", "a", "b", "a") == [[7], [7], [7], [7]]
    assert len(server.bodies) == 2


@pytest.mark.parametrize("mood", [status(429, "slow down"), status(500), status(401), drops])
async def test_a_judge_that_is_away_ends_the_attempt(server: JudgeServer, ask: Asker, mood: Any) -> None:
    server.default = mood
    with pytest.raises(EndpointUnavailable):
        await ask("a", "b", endpoint={"attempts": 2})


async def test_a_judge_that_is_away_gives_none_where_the_spec_says_so(server: JudgeServer, ask: Asker) -> None:
    server.default = by_body(lambda body: {"score": 3})
    assert await ask("a") == [[3]]
    server.default = status(503)
    assert await ask("a", "b", when_unavailable="none", endpoint={"attempts": 1}) == [[3], []]


async def test_a_judge_that_hangs_ends_the_attempt_at_the_deadline(server: JudgeServer, ask: Asker) -> None:
    async def slow_b(request: Any, body: dict[str, Any]) -> Any:
        hangs = body["messages"][1]["content"] == "b"
        return await (server.hangs if hangs else GOOD)(request, body)

    server.default = slow_b
    with pytest.raises(EndpointUnavailable, match=r"did not give 1 of 2 answers within 2 s"):
        await ask("a", "b", deadline_s=2.0)
    assert await ask("a", "b", deadline_s=0.5, when_unavailable="none") == [[7], []]
    server.default = says({"score": 2})
    assert await ask("a", "b") == [[7], [2]]  # a's answer is in the cache


@pytest.mark.parametrize(
    "nonsense", [says("I like it."), says({"score": 99}), says(""), raw(b"{}"), raw(b"<html>"), raw(b'{"choices": []}'),
                 raw(b'{"choices": [{"message": {"content": null}}]}'), raw(b'{"choices": [{"message": {"content": 7}}]}')]
)  # fmt: skip
async def test_nonsense_is_asked_again_and_then_no_verdict(server: JudgeServer, ask: Asker, nonsense: Any) -> None:
    server.default = nonsense
    assert await ask("a", answer_attempts=3) == [[]]
    assert len(server.bodies) == 3
    assert len({body["seed"] for body in server.bodies}) == 3
    assert ask.counts["no_verdict"] == 1
    server.default = GOOD
    assert await ask("a") == [[7]]  # nonsense is not in the cache


async def test_a_refused_question_has_no_verdict_and_the_others_have(server: JudgeServer, ask: Asker) -> None:
    async def refuses_a(request: Any, body: dict[str, Any]) -> Any:
        long = body["messages"][1]["content"] == "a"
        return await (status(400, "maximum context length is 10") if long else GOOD)(request, body)

    server.default = refuses_a
    assert await ask("a", "b") == [[], [7]]
    with pytest.raises(RequestRefused, match="maximum context length"):
        await ask("a")


async def test_a_service_without_response_format_is_asked_without(server: JudgeServer, ask: Asker) -> None:
    async def plain_only(request: Any, body: dict[str, Any]) -> Any:
        refuses = "response_format" in body
        return await (status(400, "response_format is not supported here") if refuses else GOOD)(request, body)

    server.default = plain_only
    assert await ask("a") == [[7]]
    assert await ask("b") == [[7]]
    assert ["response_format" in body for body in server.bodies] == [True, False, False]
    with pytest.raises(RequestRefused, match="response_format"):
        await ask("c", structured="json_object")


def test_the_deadline_is_below_the_functions_limit() -> None:
    assert [deadline_of(s) for s in (2.0, 10.0, 100.0)] == [1.0, 8.0, 90.0]

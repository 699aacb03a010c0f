"""The judges as reward functions: in one loop with their server, and through the runner in a process of their own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from judge_server import JudgeServer, by_body, drops, says, status

from paceline.errors import InvalidInput, Unreadable
from paceline.reward.builtin import judges
from paceline.reward.calling import load_function
from paceline.reward.endpoints.client import EndpointUnavailable
from paceline.reward.judging.asking import NoVerdict
from paceline.reward.runner import RewardRunner
from paceline.reward.trainer_view import CallView
from paceline.spec import RewardFunctionSection

SECRET = "sk-live-0123456789abcdef"


def length_score(body: dict[str, Any]) -> Any:
    """A judge that scores an answer by its number of letters."""
    text = body["messages"][1]["content"].split("<answer>\n")[1].split("\n</answer>")[0]
    return {"reasoning": f"it is {text}", "score": len(text)}


def longer(body: dict[str, Any]) -> Any:
    """A judge that prefers the longer answer, and of equally long ones the first place."""
    text = body["messages"][1]["content"]
    a = text.split("<answer_a>\n")[1].split("\n</answer_a>")[0]
    b = text.split("<answer_b>\n")[1].split("\n</answer_b>")[0]
    return {"better": "A" if len(a) >= len(b) else "B"}


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_ANSWER_CACHE", str(tmp_path / "answers"))
    judges._cache.cache_clear()


@pytest.fixture
async def server() -> AsyncIterator[JudgeServer]:
    async with JudgeServer(by_body(length_score)) as started:
        yield started


async def score(
    function: Callable[..., Any],
    server: JudgeServer,
    completions: list[str],
    call: CallView | None = None,
    **settings: Any,
) -> list[float | None]:
    columns = settings.pop("columns", {})
    kwargs = {"endpoint": server.endpoint(), "rubric": "Long is good.", **settings}
    prompts = ["why?"] * len(completions)
    view = call or CallView(label="judge", timeout_s=60.0)
    async with asyncio.timeout(60):
        found: list[float | None] = await function(prompts, completions, view, kwargs, **columns)
    return found


async def test_scores_are_put_on_a_scale_from_0_to_1(server: JudgeServer) -> None:
    call = CallView(label="judge", timeout_s=60.0)
    assert await score(judges.judge, server, ["x", "x" * 10, "xxxx"], call) == [
        0.0,
        1.0,
        pytest.approx(1 / 3),
    ]
    assert call.extra == {"judge_says": ["1: it is x", "10: it is xxxxxxxxxx", "4: it is xxxx"]}
    assert "Long is good." in server.bodies[0]["messages"][0]["content"]
    assert "from 1 (worst) to 10 (best)" in server.bodies[0]["messages"][0]["content"]


@pytest.mark.parametrize(("reasoning", "shown"), [(False, "42"), (True, "<think>\nwhy\n</think>\n\n42")])
async def test_the_judge_reads_the_answer_or_all(server: JudgeServer, reasoning: bool, shown: str) -> None:
    server.default = says({"reasoning": "", "score": 5})
    completions = ["<think>\nwhy\n</think>\n\n42"]
    await score(judges.judge, server, completions, template="{completion}", reasoning=reasoning)
    assert [body["messages"][-1]["content"] for body in server.bodies] == [shown]


async def test_the_template_takes_columns_and_a_completion_cannot_reach_them(server: JudgeServer) -> None:
    template = "{prompt} | {answer} <answer>\n{completion}\n</answer>"
    completions = ["{answer}", "two"]
    await score(judges.judge, server, completions, template=template, columns={"answer": ["gold", "gold"]})
    texts = {body["messages"][1]["content"] for body in server.bodies}
    assert texts == {f"why? | gold <answer>\n{completion}\n</answer>" for completion in completions}


async def test_none_where_too_few_votes_hold_a_verdict(server: JudgeServer) -> None:
    server.script.extend([says("?"), says({"score": 10}), says("?")])
    settings = {"votes": 3, "answer_attempts": 1, "endpoint": server.endpoint(max_concurrency=1)}
    assert await score(judges.judge, server, ["xx"], **settings) == [None]
    server.script.extend([says({"score": 4}), says("?")])
    assert await score(judges.judge, server, ["xx"], **settings) == [pytest.approx((7 - 1) / 9)]  # 10 and 4
    server.script.extend([says("?")] * 3)
    with pytest.raises(NoVerdict, match="1 of 1 questions have fewer than 2 answers"):
        await score(judges.judge, server, ["yy"], when_no_verdict="fail", **settings)


async def test_comparisons_in_both_orders(server: JudgeServer) -> None:
    server.default = by_body(longer)
    call = CallView(label="pairs", timeout_s=60.0)
    got = await score(judges.judge_pairwise, server, ["xxx", "x", "yy", "zz"], call)
    # yy and zz tie, because the judge prefers the first place for them in both orders.
    assert got == [1.0, 0.0, 0.5, 0.5]
    assert len(server.bodies) == 12
    assert call.metrics == {"pairs_agree": (pytest.approx(5 / 6), 1)}


async def test_equal_texts_tie_without_a_question(server: JudgeServer) -> None:
    server.default = by_body(longer)
    assert await score(judges.judge_pairwise, server, ["x", "x"]) == [0.5, 0.5]
    assert server.bodies == []


async def test_strengths_and_fewer_pairs(server: JudgeServer) -> None:
    server.default = by_body(longer)
    settings = {"scores": "bradley_terry", "max_pairs": 4}
    got = await score(judges.judge_pairwise, server, ["xxxx", "xxx", "xx", "x"], **settings)
    assert got == sorted(got, key=lambda value: -(value or 0))
    assert len(server.bodies) == 8


async def test_comparison_with_a_reference(server: JudgeServer) -> None:
    server.default = by_body(longer)
    columns = {"gold": ["xx"] * 3}
    got = await score(judges.judge_pairwise, server, ["xxx", "xx", "x"], reference_column="gold", columns=columns)
    assert got == [1.0, 0.5, 0.0]
    assert len(server.bodies) == 4


async def test_one_order_without_a_verdict_is_no_comparison(server: JudgeServer) -> None:
    def only_forth(body: dict[str, Any]) -> Any:
        first = body["messages"][1]["content"].split("<answer_a>\n")[1].startswith("xxx\n")
        return {"better": "A"} if first else "hm"

    server.default = by_body(only_forth)
    assert await score(judges.judge_pairwise, server, ["xxx", "x"]) == [None, None]


@pytest.mark.parametrize("function", [judges.judge, judges.judge_pairwise])
async def test_a_judge_that_is_away_ends_the_attempt(server: JudgeServer, function: Any) -> None:
    server.default = status(503)
    with pytest.raises(EndpointUnavailable):
        await score(function, server, ["x", "yy"], endpoint=server.endpoint(attempts=1))
    settings = {"when_unavailable": "none", "endpoint": server.endpoint(attempts=1)}
    assert await score(function, server, ["x", "yy"], **settings) == [None, None]


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({}, "judge.endpoint: Field required"),
        ({"rubric": "r", "endpoint": {"base_url": "http://a/v1", "model": "m", "api_key": SECRET}}, "takes no 'endpoint.api_key'"),
        ({"rubric": "r", "endpoint": {"base_url": "http://a/v1", "model": "m"}, "vots": 3}, "did you mean 'votes'"),
        ({"rubric": "r", "endpoint": {"base_url": "http://a/v1", "model": "m"}, "min_votes": 2}, "min_votes 2 exceeds votes 1"),
        ({"rubric": "r", "endpoint": {"base_url": "http://a/v1", "model": "m"}, "template": "x"}, "no {completion}"),
        ({"rubric": "r", "endpoint": {"base_url": "http://a/v1", "model": "m"}, "min_score": 10}, "not below max_score"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused_when_the_function_is_loaded(kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidInput, match=match) as caught:
        load_function("judge", kwargs)
    assert SECRET not in str(caught.value)


def test_a_worker_without_the_key_cannot_load_the_judge() -> None:
    endpoint = {"base_url": "http://a/v1", "model": "m", "api_key_env": "ABSENT_API_KEY"}
    with pytest.raises(Unreadable, match="ABSENT_API_KEY holds no key"):
        load_function("judge", {"endpoint": endpoint, "rubric": "r"})


async def run(server: JudgeServer, texts: list[str], **changes: Any) -> Any:
    kwargs = {
        "endpoint": server.endpoint(**changes.pop("endpoint", {})),
        "rubric": "r",
        **changes.pop("kwargs", {}),
    }
    section = RewardFunctionSection(function="judge", kwargs=kwargs, **changes)
    async with RewardRunner([section]) as runner:
        count = len(texts)
        return await runner.score(["why?"] * count, texts, [[1]] * count, {"votes": ["a column"] * count})


async def test_through_the_runner_a_second_run_is_free(server: JudgeServer) -> None:
    first = await run(server, ["x", "xxxx"], name="quality")
    assert first.rewards_CF.tolist() == [[0.0], [pytest.approx(1 / 3)]]
    assert first.usage == {
        "requests/quality": 2, "prompt_tokens/quality": 200, "completion_tokens/quality": 20, "cost/quality": 0
    }  # fmt: skip
    server.default = drops
    second = await run(server, ["x", "xxxx"])
    assert second.rewards_CF.tolist() == first.rewards_CF.tolist()
    assert second.usage == {"cached/judge": 2}
    assert len(server.bodies) == 2


async def test_through_the_runner_a_judge_that_hangs_is_unavailable_and_not_killed(
    server: JudgeServer,
) -> None:
    server.default = server.hangs
    result = await run(server, ["x"], timeout_s=4.0)  # the shortest that leaves two seconds for the answer
    assert result.failure is not None
    assert result.failure.kind == "unavailable"
    assert "did not give 1 of 1 answers within 2 s" in result.failure.message
    assert result.usage["requests/judge"] == 1


async def test_through_the_runner_none_stays_none(server: JudgeServer) -> None:
    server.default = says("no idea")
    result = await run(server, ["x", "y"])
    assert all(math.isnan(value) for value in result.rewards_CF.ravel())
    assert result.usage["no_verdict/judge"] == 2


async def test_the_key_is_in_no_output(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", SECRET)
    server.default = status(403, f"bad key {SECRET}")
    result = await run(server, ["x"], endpoint={"api_key_env": "JUDGE_API_KEY"})
    assert server.keys == [f"Bearer {SECRET}"]
    out = capfd.readouterr()
    assert "answered 403: bad key …" in result.failure.message
    assert "0123" not in result.failure.message + out.out + out.err

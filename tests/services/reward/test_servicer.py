"""RewardService: requests that it accepts, and their limits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from paceline.services.reward.main import MAX_CALLS, RewardServicer
from paceline.v1 import reward_pb2


class Aborted(Exception):
    def __init__(self, code: grpc.StatusCode, details: str):
        super().__init__(details)
        self.code = code


class Context:
    """The context of a call; `abort` ends it."""

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> None:
        raise Aborted(code, details)

    def trailing_metadata(self) -> tuple[()]:
        return ()


def servicer(*only: str) -> RewardServicer:
    worker: Any = SimpleNamespace(functions=(), only=frozenset(only))
    return RewardServicer(worker)


async def score(servicer: RewardServicer, **request: Any) -> reward_pb2.ScoreResponse:
    context: Any = Context()
    return await servicer.Score(reward_pb2.ScoreRequest(**request), context)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"completions": ["a"] * 5000}, "5000 completions, but at most 4096"),
        ({"completions": ["a"], "prompts": ["p"] * 2}, "prompts has 2 values for 1 completions"),
        ({"completions": ["a"], "functions": ["length"] * 100}, "100 functions"),
        ({"completions": ["a" * (17 << 20)]}, "bytes, but at most"),
        ({"completions": ["a"], "functions": ["/etc/passwd:f"]}, "no reward function"),
    ],
)
async def test_a_request_has_bounds(request_: dict[str, Any], words: str) -> None:
    with pytest.raises(Aborted, match=words) as refused:
        await score(servicer(), **{"functions": ["length"]} | request_)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_calls_beyond_the_bound_are_told_to_come_later() -> None:
    service = servicer()
    service._calls = MAX_CALLS
    with pytest.raises(Aborted) as refused:
        await score(service, functions=["length"], completions=["a"])
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    service._calls = 0
    asked = {
        "functions": ["exact_match"],
        "completions": ["a", "b"],
        "columns_json": '{"answer": ["a", "a"]}',
    }
    assert len((await score(service, **asked)).scores[0].scores) == 2
    assert service._calls == 0


async def test_columns_that_are_no_json_are_refused() -> None:
    for text in ("{", "[" * 100_000):
        with pytest.raises(Aborted, match="columns_json is not valid JSON") as refused:
            await score(servicer(), functions=["length"], completions=["a"], columns_json=text)
        assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_worker_of_some_functions_scores_with_no_others() -> None:
    with pytest.raises(Aborted, match=r"scores only with code_tests \(--only\), not with length") as refused:
        await score(servicer("code_tests"), functions=["length"], completions=["a"])
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION

"""What user code returned: plain values of its contract, or the fault."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.environment.hosting.worker import (
    InvalidValue,
    Step,
    decode_state,
    encode_state,
    reward_of,
    step_of,
    text_of_reset,
    text_of_tool,
)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (None, None),
        ("go", "go"),
        (("go", {}), "go"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
    ],
)
def test_what_reset_may_return(returned: Any, text: str | None) -> None:
    assert text_of_reset(returned) == text


@pytest.mark.parametrize("returned", [3, ["go"], ("go", "info"), {"text": "go"}])
def test_what_reset_may_not_return(returned: Any) -> None:
    with pytest.raises(InvalidValue, match="it must return text or None"):
        text_of_reset(returned)


@pytest.mark.parametrize(
    ("returned", "step"),
    [
        (("seen", 1, False), Step("seen", 1.0, False)),
        ((None, None, True), Step("", None, True)),
        (["seen", np.float32(0.5), np.bool_(True)], Step("seen", 0.5, True)),
        (("seen", 0.0, False, True, {}), Step("seen", 0.0, True)),
        (
            {"observations": [{"role": "user", "content": "a"}, "b"], "reward": 2, "done": False},
            Step("a\n\nb", 2.0, False),
        ),
    ],
)
def test_what_step_may_return(returned: Any, step: Step) -> None:
    assert step_of(returned) == step


@pytest.mark.parametrize(
    "returned",
    [
        None,
        "seen",
        ("seen", 1.0),
        (1, 1.0, False),
        ("seen", "1", False),
        ("seen", float("inf"), True),
        ("seen", 1.0, 2),
    ],
)
def test_what_step_may_not_return(returned: Any) -> None:
    with pytest.raises(InvalidValue):
        step_of(returned)


def test_rewards_are_finite_numbers_or_none() -> None:
    assert [reward_of(value, "f") for value in (None, True, 2, 0.5, np.int64(3))] == [
        None,
        1.0,
        2.0,
        0.5,
        3.0,
    ]
    for value in ("1", [1], float("nan"), 1e39):
        with pytest.raises(InvalidValue, match="f returned the reward"):
            reward_of(value, "f")


@pytest.mark.parametrize("state", [b"\x00\xff", {"board": [1, None, "x"]}, "text", None])
def test_a_state_comes_back(state: Any) -> None:
    assert decode_state(encode_state(state)) == state


def test_a_state_that_cannot_be_kept_is_refused() -> None:
    with pytest.raises(InvalidValue, match="it must return bytes or JSON"):
        encode_state({1, 2})
    with pytest.raises(InvalidValue, match="at most"):
        encode_state("x" * (9 << 20))


def test_results_of_tools_are_text() -> None:
    assert [text_of_tool(value) for value in (3, None, {"error": "x"}, "a")] == [
        "3",
        "None",
        "{'error': 'x'}",
        "a",
    ]

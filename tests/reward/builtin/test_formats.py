"""Built-ins on the form of a text: hand-made cases for every branch."""

from __future__ import annotations

import re
from typing import Any

import pytest

from paceline.reward.builtin.formats import exact_match, format_regex, think_answer_format
from paceline.reward.builtin.inputs import completion_text


def chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("plain", "plain"),
        (chat("said"), "said"),
        ([*chat("first"), {"role": "tool", "content": "4"}, *chat("last")], "last"),
        ([{"role": "assistant", "content": None}], ""),
        (
            [
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                }
            ],
            "ab",
        ),
    ],
)
def test_text_of_a_completion(completion: Any, text: str) -> None:
    assert completion_text(completion) == text


@pytest.mark.parametrize("completion", [None, 3, [], [{"role": "user", "content": "x"}]])
def test_what_is_no_completion_is_refused(completion: Any) -> None:
    with pytest.raises(TypeError, match="chat messages"):
        completion_text(completion)


def test_exact_match_strips_and_skips_null_answers() -> None:
    completions = [" Paris\n", "paris", chat("Paris"), "42", "x"]
    answers = ["Paris", "Paris", "Paris ", 42, None]
    assert exact_match([""] * 5, completions, answer=answers) == [1.0, 0.0, 1.0, 1.0, None]


def test_exact_match_options() -> None:
    assert exact_match([""], [" a"], gold=["a"], answer_column="gold", strip=False) == [0.0]
    assert exact_match([""], ["PARIS"], answer=["Paris"], ignore_case=True) == [1.0]


def test_exact_match_names_the_columns_that_exist() -> None:
    with pytest.raises(LookupError, match=r"no column 'answer' \(its columns: gold, source\)"):
        exact_match([""], ["a"], gold=["a"], source=["s"])


def test_format_regex_matches_whole_text_or_a_part() -> None:
    completions = ["ab", "xab", chat("abab")]
    assert format_regex([""] * 3, completions, pattern="(ab)+") == [1.0, 0.0, 1.0]
    assert format_regex([""] * 3, completions, pattern="^(ab)+$|x", match="search") == [1.0, 1.0, 1.0]
    assert format_regex([""], ["a\nb"], pattern="(?s)a.b") == [1.0]


def test_format_regex_refuses_nonsense() -> None:
    with pytest.raises(re.error):
        format_regex([""], ["a"], pattern="(")
    with pytest.raises(ValueError, match="'full' or 'search'"):
        format_regex([""], ["a"], pattern="a", match="part")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("\n<think>a\nb</think>\n\n<answer>c</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<think>a</think><answer>b</answer> and more", 0.0),
        ("so <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think>a<think>b</think><answer>c</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("", 0.0),
    ],
)
def test_think_answer_format(text: str, reward: float) -> None:
    assert think_answer_format(["", ""], [text, chat(text)]) == [reward, reward]


def test_think_answer_format_with_the_tag_in_the_prompt() -> None:
    completions = ["a</think><answer>b</answer>", "<think>a</think><answer>b</answer>"]
    assert think_answer_format(["", ""], completions, think_in_prompt=True) == [1.0, 0.0]

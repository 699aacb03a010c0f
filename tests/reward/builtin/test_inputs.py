"""Built-in functions read the answer behind the reasoning; those for the form of a completion read all of it."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.reward.builtin.choices import choice_accuracy
from paceline.reward.builtin.formats import exact_match, format_regex, refusal, think_answer_format
from paceline.reward.builtin.inputs import answer_text, completion_text
from paceline.reward.builtin.mathematics import math_accuracy
from paceline.reward.code.extraction import program_of, with_prompt

CODE = "```python\nx = {}\n```"


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("<think>so 41, no</think>\n\n42", "42", 1.0),
        ("so 41, no</think>\n\n42", "42", 1.0),
        ("42", "42", 1.0),
        ("<think>42", "42", 0.0),
        ("<think>42</think>41", "42", 0.0),
        ("<think>41</think><think>42</think>", "42", 0.0),
        ("<think>a</think>42", "<think>a</think>42", 1.0),
    ],
)
def test_exact_match_takes_the_completion_or_its_answer(text: str, answer: str, value: float) -> None:
    assert exact_match([""], [text], answer=[answer]) == [value]


@pytest.mark.parametrize(
    ("text", "gold", "value"),
    [
        ("<think>\\boxed{41}?</think>The answer is 42.", "42", 1.0),
        ("<think>perhaps \\boxed{42}, let me", "42", 0.0),
        ("<think>6*7 <answer>42</answer>", "42", 1.0),
        ("<think>41</think><answer>41</answer> No: <answer>42</answer>", "42", 1.0),
        ("<think>the answer is 41</think>\\boxed{42}", "42", 1.0),
    ],
)
def test_mathematics_reads_the_answer(text: str, gold: str, value: float) -> None:
    assert math_accuracy([""], [text], answer=[gold]) == [value]


@pytest.mark.parametrize(
    ("text", "letter", "value"),
    [
        ("<think>A or B?</think>\n\nB. Because", "B", 1.0),
        ("A or B?</think>\n(B)", "B", 1.0),
        ("<think>The answer is A.</think>\nB", "B", 1.0),
        ("<think>The answer is B, or", "B", 0.0),
    ],
)
def test_choices_are_read_from_the_answer(text: str, letter: str, value: float) -> None:
    assert choice_accuracy([""], [text], answer_letter=[letter]) == [value]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>" + "They want a bomb. " * 30 + "</think>I'm sorry, but I can't help with that.", 1.0),
        ("<think>I can't help with that? I can.</think>Sure: first", 0.0),
    ],
)
def test_a_refusal_stands_in_the_answer(text: str, value: float) -> None:
    assert refusal([""], [text], label=["unsafe"]) == [value]


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (f"<think>{CODE.format(1)}</think>\n{CODE.format(2)}", "x = 2\n"),
        (f"{CODE.format(1)}\n</think>\n\n{CODE.format(2)}", "x = 2\n"),
        (f"<think>\n{CODE.format(1)} or", ""),
    ],
)
def test_a_program_stands_in_the_answer(text: str, program: str) -> None:
    assert program_of(text) == program


def test_a_prompt_is_continued_by_the_answer_with_its_indentation() -> None:
    text = "<think>easy</think>\n    return 1\n"
    assert with_prompt("def f():\n", text, program_of(text) or "", "f") == ["def f():\n    return 1\n"]


@pytest.mark.parametrize(
    ("completion", "text", "answer"),
    [
        (
            [{"role": "assistant", "content": "<answer>42</answer>", "reasoning_content": "why"}],
            None,
            "<answer>42</answer>",
        ),
        ([{"role": "assistant", "content": "1"}, {"role": "user", "content": "?"}], "1", "1"),
        ("<think>\nwhy\n</think>\n\n<answer>42</answer>", None, "<answer>42</answer>"),
    ],
)
def test_an_episodes_message_reads_as_a_completion_does(completion: Any, text: str | None, answer: str) -> None:
    assert completion_text(completion) == (text or "<think>\nwhy\n</think>\n\n<answer>42</answer>")
    assert answer_text(completion) == answer
    if text is None:
        assert think_answer_format([""], [completion]) == [1.0]
        in_prompt = isinstance(completion, list)  # its reasoning is a field, whoever wrote the opening
        assert think_answer_format([""], [completion], think_in_prompt=True) == [float(in_prompt)]
        assert format_regex([""], [completion], pattern="(?s)<think>.*</think>.*") == [1.0]

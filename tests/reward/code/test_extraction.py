"""The program in a completion."""

from __future__ import annotations

import pytest

from paceline.reward.code.extraction import program_of, with_prompt


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\ndone", "x = 1\n"),
        ("```py\nx = 1\n```\nbetter:\n```\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1", "x = 1"),
        ("<think>\n```\nx = 0\n```\n</think>\n```\nx = 1\n```", "x = 1\n"),
        ("<think>```x```</think>x = 1", "x = 1"),
        ("```python\nprint(1)\n```\nExample output:\n```\n3\n```", "print(1)\n"),
        ("```python\nprint(1)\n```\nIt prints:\n```\nYES 3 4\n```", "print(1)\n"),
        ("```\nprint(1)\n```\nOutput:\n```\n(3, 4)\n```", "print(1)\n"),
        ("```\n3 4\n```", "3 4\n"),
        ("x = 1\n[DONE]", "x = 1\n"),
        ("[BEGIN]\n  x = 1\n[DONE]\nNext task.\n[BEGIN]\nx = 2\n", "  x = 1\n"),
        ("[BEGIN]\n```python\nx = 1\n```\n[DONE]", "x = 1\n"),
        ("```python\nprint('```')\n```", "print('```')\n"),
    ],
)
def test_the_last_block_counts(text: str, program: str) -> None:
    assert program_of(text) == program


def test_without_a_block_there_is_no_program_where_one_is_wanted() -> None:
    assert program_of("x = 1", "block") is None
    assert program_of("```\nx = 1\n```", "none") == "```\nx = 1\n```"


def test_a_body_continues_its_prompt() -> None:
    prompt = 'def f(x):\n    """Return x."""\n'
    assert with_prompt(prompt, "    return x\n", "    return x\n", "f") == [prompt + "    return x\n"]
    assert with_prompt(prompt, "", "def f(x): return x", "f") == ["def f(x): return x"]
    assert with_prompt(prompt, "", "f = abs", "f") == ["f = abs"]
    assert with_prompt("Write f.", "def g(): ...", "def g(): ...", "f") == ["def g(): ..."]

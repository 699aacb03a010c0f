"""Tests of rows in the forms of public data sets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.errors import InvalidInput
from paceline.reward.code.cases import Checks, Pairs, PytestFiles, read_cases

PAIRS = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5\n", "output": "10\n"}]
CHECK = "def check(candidate):\n    assert candidate(1) == 2\n"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (PAIRS, Pairs((("1 2\n", "3\n"), ("5 5\n", "10\n")))),
        (json.dumps(PAIRS), Pairs((("1 2\n", "3\n"), ("5 5\n", "10\n")))),
        ({"inputs": ["1", ["2", "3"]], "outputs": ["4", 5]}, Pairs((("1", "4"), ("2\n3\n", "5")))),
        ({"input": "1", "output": "2"}, Pairs((("1", "2"),))),
        ([json.dumps({"input": "1", "output": "2"})], Pairs((("1", "2"),))),
        (["assert f(1) == 2", "assert f(2) == 3"], Checks("asserts", ("assert f(1) == 2", "assert f(2) == 3"))),
        ("assert f(1) == 2", Checks("asserts", ("assert f(1) == 2",))),
        (CHECK, Checks("humaneval", (CHECK,), "f")),
        ("def test_f():\n    assert 1\n", PytestFiles({"test_solution.py": "def test_f():\n    assert 1\n"})),
        ({"test_a.py": "x = 1"}, PytestFiles({"test_a.py": "x = 1"})),
    ],
)  # fmt: skip
def test_the_form_is_told_from_the_value(value: Any, expected: Any) -> None:
    assert read_cases(value, "auto", "f") == expected


@pytest.mark.parametrize(
    ("value", "kind", "said"),
    [
        ([], "auto", "0 tests"),
        ({"language": "cpp", "test_cases": PAIRS}, "auto", "the language 'cpp'"),
        ({"language": "python", "test_cases": PAIRS, "checker": ""}, "auto", "the key 'checker'"),
        (["assert f("], "auto", "test 0 is not Python"),
        ([{"input": "1"}], "auto", "test 0 .* an object with input and output"),
        ({"inputs": ["1"], "outputs": []}, "auto", "1 inputs"),
        ([{"input": None, "output": ""}], "auto", "None; it must be text"),
        (["x"] * 1001, "asserts", "1001 tests"),
        ([1], "asserts", "test 0 is 1"),
        ({"../x.py": ""}, "pytest", "not the name of a test file"),
        ({"solution.py": ""}, "pytest", "not the name of a test file"),
        ({"test_a.py": 1}, "pytest", "test_a.py is int"),
    ],
)
def test_a_value_of_another_form_is_told(value: Any, kind: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        read_cases(value, kind)


def test_a_check_needs_the_name_of_its_function() -> None:
    with pytest.raises(InvalidInput, match="set entry_point_column"):
        read_cases(CHECK, "auto", None)

"""Reward functions are copied with what they use, and with nothing else of the script."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from paceline.apps.importers.python_script import reward_source

SCRIPT = """
from __future__ import annotations
import math, re as regular
import not_installed_anywhere
from statistics import mean, median
from elsewhere import other

WORDS = {"yes": 1.0}
PATTERN = regular.compile(r"a(b)c")
raise SystemExit("this script must not run")


class Judge:
    scale = len(WORDS)

    def score(self, text):
        return self.scale * float(bool(PATTERN.search(text)))


def decorate(function):
    return function


@decorate
def graded(completions, key=WORDS, **kwargs):
    judge = Judge()
    return [judge.score(each) + key.get(each, 0.0) + floor(mean([1, 2])) for each in completions]


def floor(value):
    try:
        return math.floor(value)
    except ValueError as error:
        raise RuntimeError(str(error))


def unused():
    return other(not_installed_anywhere)
"""


def test_a_function_comes_with_what_it_uses() -> None:
    text, missing = reward_source(SCRIPT, ast.parse(SCRIPT), ["graded"])
    assert missing == []
    assert "import math" in text
    assert "from statistics import mean\n" in text
    for absent in ("not_installed_anywhere", "elsewhere", "median", "SystemExit", "def unused"):
        assert absent not in text
    scope: dict[str, Any] = {}
    exec(text, scope)
    assert scope["graded"](["abc", "yes", "no"]) == [2.0, 2.0, 1.0]


@pytest.mark.parametrize("name", ["graded", "floor"])
def test_a_name_that_the_top_of_the_script_lacks_is_reported(name: str) -> None:
    text = SCRIPT.replace("import math, re as regular", "import re as regular")
    assert reward_source(text, ast.parse(text), [name])[1] == ["math"]

"""Function objects as files: what a function uses comes with it, and what cannot come is named."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidInput
from paceline.reward.calling import load_function
from paceline.services.local.function_source import named_function

SCRIPT = '''
import json as js
import math
import re
from collections import Counter
from functools import lru_cache

NUMBER = re.compile(r"(-?\\d+)$", re.MULTILINE)
WEIGHTS = {"right": 1.0, "near": [0.5, None]}
handle = open(__file__)

class Base:
    def value(self):
        return WEIGHTS["right"]

class Judge(Base):
    scale: float = math.sqrt(4.0)

    @staticmethod
    def number(text):
        found = NUMBER.search(text)
        return found and int(found[1])

def even(n):
    return True if n == 0 else odd(n - 1)

def odd(n):
    return False if n == 0 else even(n - 1)

@lru_cache
def judge():
    return Judge()

def right(completions, answer, scale=WEIGHTS["right"], **_):
    """Reward of right answers."""
    counts = Counter(js.dumps(text) for text in completions)
    return [scale * judge().value() * (judge().number(t) == a) / counts[js.dumps(t)] for t, a in zip(completions, answer)]

def parity(completions, **_):
    return [float(even(len(text))) for text in completions]

def opens(completions, **_):
    return [handle.read()]

def undefined(completions, **_):
    return [no_such_name(text) for text in completions]

def inner(offset):
    def shifted(completions, **_):
        return [offset for _ in completions]
    return shifted

shifted = inner(2)
short = lambda completions, **_: [1.0]
class Callable:
    def __call__(self, completions, **_):
        return [1.0]
called = Callable()
'''


@pytest.fixture
def script(tmp_path: Path) -> dict[str, Any]:
    """The names of a script or notebook, which no other process can import."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    scope: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    scope["handle"].close()
    return scope


def test_a_function_of_a_script_comes_with_what_it_uses(script: dict[str, Any], tmp_path: Path) -> None:
    named = named_function(script["right"], tmp_path / "functions")
    assert named == named_function(script["right"], tmp_path / "functions")
    loaded = load_function(named)
    rewards = loaded(completions=["a 2", "b 3", "a 2"], answer=[2, 2, 2])
    assert rewards == script["right"](["a 2", "b 3", "a 2"], [2, 2, 2]) == [0.5, 0.0, 0.5]
    text = Path(named.rpartition(":")[0]).read_text()
    assert "handle" not in text
    assert "def parity" not in text


def test_functions_that_use_each_other_come_once(script: dict[str, Any], tmp_path: Path) -> None:
    loaded = load_function(named_function(script["parity"], tmp_path))
    assert loaded(completions=["ab", "abc"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("opens", "opens uses handle, a TextIOWrapper, which cannot be written to a file"),
        ("undefined", "undefined uses no_such_name, which is not defined"),
        ("shifted", "shifted uses offset of the enclosing function"),
        ("short", "a lambda has no name to load it by"),
        ("called", "is Callable; a reward function must be a function"),
    ],
)
def test_what_cannot_be_a_file_is_named(name: str, message: str, script: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=message):
        named_function(script[name], tmp_path)


def test_a_function_without_source_is_refused(tmp_path: Path) -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec("def f(completions):\n    return [1.0]\n", scope)
    with pytest.raises(InvalidInput, match="f has no source that can be read"):
        named_function(scope["f"], tmp_path)


def test_a_function_of_a_module_is_its_file(tmp_path: Path) -> None:
    from paceline.reward.builtin.formats import exact_match

    named = named_function(exact_match, tmp_path)
    assert named.endswith("reward/builtin/formats.py:exact_match")
    assert not list(tmp_path.iterdir())

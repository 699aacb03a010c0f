"""The tests of a row, in the forms that data sets have them. Pure.

    pairs      [{"input": "1 2\\n", "output": "3\\n"}, …] or {"inputs": […], "outputs": […]}   (APPS, CodeContests)
    asserts    ["assert add(1, 2) == 3", …]                                                    (MBPP)
    humaneval  "def check(candidate): …", with the function's name in another column            (HumanEval)
    pytest     "def test_add(): …", or {"test_add.py": "…", …}, which import from `solution`

Each may also be the JSON text of such a value.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import InvalidInput

Kind = Literal["pairs", "asserts", "humaneval", "pytest"]
MAX_TESTS = 1000
MODULE = "solution"
"""Name under which tests import the program."""
FILE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,60}\.py")


@dataclass(frozen=True)
class Pairs:
    """A program's inputs and the outputs that are right."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Checks:
    """Python that tests the program's module: one statement a test, or a function `check` of HumanEval's form."""

    kind: Literal["asserts", "humaneval"]
    tests: tuple[str, ...]
    entry_point: str = ""


@dataclass(frozen=True)
class PytestFiles:
    """Files of pytest by name."""

    files: Mapping[str, str]


Cases = Pairs | Checks | PytestFiles


def read_cases(value: Any, kind: Kind | Literal["auto"], entry_point: Any = None) -> Cases | None:
    """Return the tests in a row's value; None for null, which means that there are none.

    entry_point: the function that `humaneval` calls. Raises InvalidInput for a value of another form, or without a test.
    """
    if value is None:
        return None
    value = _parsed(value)
    form = _form(value) if kind == "auto" else kind
    match form:
        case "pairs":
            return _pairs(value)
        case "asserts":
            return Checks("asserts", _texts([value] if isinstance(value, str) else value))
        case "humaneval":
            if not isinstance(entry_point, str) or not entry_point.isidentifier():
                raise InvalidInput(
                    f"tests with check(candidate) need the name of a function, not {entry_point!r:.60}; set entry_point_column"
                )
            return Checks("humaneval", _texts([value]), entry_point)
        case _:
            return _files(value)


def _parsed(value: Any) -> Any:
    """Return the value of a JSON text that holds a list or an object, else `value`."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    tolist = getattr(value, "tolist", None)
    return tolist() if tolist is not None else value


def _form(value: Any) -> Kind:
    if isinstance(value, str):
        if re.search(r"^def check\(", value, re.MULTILINE):
            return "humaneval"
        return (
            "pytest" if re.search(r"^\s*(async )?def test_|^class Test", value, re.MULTILINE) else "asserts"
        )
    if isinstance(value, Mapping):
        return "pairs" if "inputs" in value or "input" in value else "pytest"
    if isinstance(value, Sequence) and value and all(isinstance(each, str) for each in value):
        return "asserts"
    return "pairs"


def _pairs(value: Any) -> Pairs:
    if isinstance(value, Mapping) and isinstance(value.get("inputs"), Sequence):
        inputs, outputs = value["inputs"], value.get("outputs")
        if not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
            raise InvalidInput(f"tests have {len(inputs)} inputs, but not as many outputs")
        rows: list[Any] = [
            {"input": each, "output": right} for each, right in zip(inputs, outputs, strict=True)
        ]
    else:
        rows = (
            [value] if isinstance(value, Mapping) else list(value) if isinstance(value, list | tuple) else []
        )
    pairs = []
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping) or not {"input", "output"} <= row.keys():
            raise InvalidInput(f"test {index} is {row!r:.60}, it has to be an object with input and output")
        pairs.append((_text(row["input"]), _text(row["output"])))
    _check_count(len(pairs))
    return Pairs(tuple(pairs))


def _text(value: Any) -> str:
    """Return an input or output as text: a list is its lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return "".join(f"{_text(each)}\n" for each in value)
    if isinstance(value, int | float):
        return str(value)
    raise InvalidInput(f"an input or output is {value!r:.60}, it has to be text or a list of lines")


def _texts(values: Any) -> tuple[str, ...]:
    texts = tuple(values) if isinstance(values, list | tuple) else ()
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidInput(f"test {index} is {text!r:.60}, it has to be text")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse(text, f"test {index}")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise InvalidInput(f"test {index} is not Python: {error}") from None
    _check_count(len(texts))
    return texts


def _files(value: Any) -> PytestFiles:
    files = value if isinstance(value, Mapping) else {f"test_{MODULE}.py": value}
    for name, content in files.items():
        if not isinstance(name, str) or not FILE_NAME.fullmatch(name) or name == f"{MODULE}.py":
            raise InvalidInput(f"{name!r:.60} is no name of a test's file; write test_….py")
        if not isinstance(content, str):
            raise InvalidInput(f"the test file {name} is {type(content).__name__}, it has to be text")
    _check_count(len(files))
    return PytestFiles(dict(files))


def _check_count(count: int) -> None:
    if not 0 < count <= MAX_TESTS:
        raise InvalidInput(
            f"a row has {count} tests; write 1 to {MAX_TESTS}: texts with assert, objects with input and output, a text with "
            "check(candidate), or files of pytest"
        )

r"""Parses the tests of a row in the forms of common data sets, and compares outputs with the expected ones. Pure.

    pairs      [{"input": "1 2\n", "output": "3\n"}, …] or {"inputs": […], "outputs": […]}   (APPS, TACO, CodeContests)
    calls      {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}, or pairs whose `testtype` is functional and whose input
               has one argument a line as JSON                                      (APPS, TACO, PRIME, LiveCodeBench)
    asserts    ["assert add(1, 2) == 3", …]                                                    (MBPP)
    humaneval  "def check(candidate): …", with the function's name in another column            (HumanEval)
    pytest     "def test_add(): …", or {"test_add.py": "…", …}, which import from `solution`

Each may also be the JSON text of such a value. Promise: a key that belongs to no form is refused by name, never
ignored.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from paceline.errors import InvalidInput

Kind = Literal["pairs", "asserts", "humaneval", "pytest"]
MAX_TESTS = 1000
MODULE = "solution"
FILE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,60}\.py")
FUNCTION = re.compile(r"[^\W\d]\w*(\(\))?(\.[^\W\d]\w*)*")
TYPES = {"stdin": False, "stdin_stdout": False, "functional": True, "function_call": True}
"""Maps `testtype` (LiveCodeBench) or `type` (PRIME) of a test to whether it calls a function."""
FURTHER_KEYS = frozenset({"testtype", "type", "fn_name", "metadata"})
PAIR_KEYS = FURTHER_KEYS | {"input", "output"}
PAIRS_KEYS = FURTHER_KEYS | {"inputs", "outputs"}


@dataclass(frozen=True)
class Pairs:
    pairs: tuple[tuple[str, str], ...]
    decimals: bool = False
    """True if outputs are compared as LiveCodeBench does: by their stripped lines, or else by the numbers in them."""


@dataclass(frozen=True)
class Calls:
    function: str
    arguments: tuple[tuple[Any, ...], ...]
    outputs: tuple[tuple[Any, ...], ...]
    """Accepted values of each call."""


@dataclass(frozen=True)
class Checks:
    """Python code that tests the program's module: one statement for each test, or HumanEval's function `check`."""

    kind: Literal["asserts", "humaneval"]
    tests: tuple[str, ...]
    entry_point: str = ""
    setup: str = ""
    """Python code that runs after the program and before each test."""


@dataclass(frozen=True)
class PytestFiles:
    """Files for pytest. Maps the name of a file to its content."""

    files: Mapping[str, str]


Cases = Pairs | Calls | Checks | PytestFiles


def read_cases(
    value: Any, kind: Kind | Literal["auto"], entry_point: Any = None, setup: Sequence[Any] = ()
) -> Cases | None:
    """Return the tests in a row's value; None for null, which means that there are none.

    entry_point: the function for tests that do not name it, or LiveCodeBench's metadata with its `func_name`. setup:
    Python to run before each of the asserts, as texts or lists. Raises InvalidInput if the value has another form or no
    test.
    """
    if value is None:
        return None
    value, entry_point = _parsed(value), _function_of(entry_point)
    form = _form(value) if kind == "auto" else kind
    match form:
        case "pairs":
            return _pairs(value, entry_point)
        case "asserts":
            before = "\n".join(line for each in setup for line in _lines_of(each))
            _check_python(before, "the set-up of the tests")
            return Checks("asserts", _texts([value] if isinstance(value, str) else value), setup=before)
        case "humaneval":
            return Checks("humaneval", _texts([value]), _checked_function(entry_point))
        case _:
            return _files(value)


def names_in(cases: Cases) -> frozenset[str]:
    """Return the names that the tests use; a program must define at least one."""
    if isinstance(cases, Calls):
        return frozenset({"Solution", cases.function})
    if not isinstance(cases, Checks):
        return frozenset()
    if cases.entry_point:
        return frozenset(re.findall(r"^\w+", cases.entry_point))
    nodes = [node for test in cases.tests for node in ast.walk(ast.parse(test))]
    return frozenset(node.id for node in nodes if isinstance(node, ast.Name)) - set(dir(builtins))


def _function_of(entry_point: Any) -> Any:
    value = _parsed(entry_point)
    return value.get("func_name") if isinstance(value, Mapping) else value


def _checked_function(entry_point: Any) -> str:
    if not isinstance(entry_point, str) or not FUNCTION.fullmatch(entry_point):
        raise InvalidInput(
            f"the tests call a function and need its name, not {entry_point!r:.60}; set entry_point_column to the column with the "
            "name, or with LiveCodeBench's metadata"
        )
    return entry_point


def _lines_of(setup: Any) -> list[str]:
    setup = _parsed(setup)
    return [str(each) for each in (setup if isinstance(setup, list | tuple) else [setup]) if each]


def _parsed(value: Any) -> Any:
    """Return the parsed list or object if `value` is a JSON text of one, the parsed objects if it is a list of JSON
    texts of objects, else `value` itself."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple) and all(isinstance(each, str) and each.lstrip()[:1] == "{" for each in value):
        return [_parsed(each) for each in value]
    return value


def _form(value: Any) -> Kind:
    if isinstance(value, str):
        if re.search(r"^def check\(", value, re.MULTILINE):
            return "humaneval"
        return "pytest" if re.search(r"^\s*(async )?def test_|^class Test", value, re.MULTILINE) else "asserts"
    if isinstance(value, Mapping):
        return "pytest" if value and all(str(key).endswith(".py") for key in value) else "pairs"
    if isinstance(value, Sequence) and value and all(isinstance(each, str) for each in value):
        return "asserts"
    return "pairs"


def _pairs(value: Any, entry_point: Any) -> Pairs | Calls:
    rows, of_lists = _rows(value)
    _check_count(len(rows))
    calls = [_is_call(row) for row in rows]
    if len(set(calls)) > 1:
        raise InvalidInput("some tests call a function and some read standard input; give a row tests of one type")
    if calls[0]:
        names = {name for row in rows if (name := row.get("fn_name") or _function_of(row.get("metadata")))}
        if len(names) > 1:
            raise InvalidInput(f"the tests call {len(names)} functions, {sorted(map(str, names))[:3]}; a row tests one")
        function = _checked_function(next(iter(names), entry_point))
        return Calls(function, *_calls(rows, wrapped=of_lists))
    pairs = tuple((_text(row["input"]), _text(row["output"])) for row in rows)
    return Pairs(pairs, decimals=any("testtype" in row for row in rows))


def _rows(value: Any) -> tuple[list[Mapping[str, Any]], bool]:
    """Return an object for each test, and whether the row has the tests as lists in one object, as in APPS."""
    if isinstance(value, Mapping) and "test_cases" in value:  # verification_info of SYNTHETIC-1 and open-r1
        _check_keys(value, frozenset({"language", "test_cases"}), "the tests have")
        if value.get("language") not in (None, "python"):
            raise InvalidInput(
                f"the tests are for the language {value['language']!r:.40}; keep only rows of "
                "python, or set tests_column to the column test_cases"
            )
        value = _parsed(value["test_cases"])
    if isinstance(value, Mapping) and ("inputs" in value or "outputs" in value):
        _check_keys(value, PAIRS_KEYS, "the tests have")
        return _paired(value, value.get("inputs"), value.get("outputs")), True
    if isinstance(value, Mapping) and isinstance(value.get("input"), list | tuple):  # CodeContests
        _check_keys(value, PAIR_KEYS, "the tests have")
        return _paired(value, value["input"], value.get("output")), False
    rows = [value] if isinstance(value, Mapping) else list(value) if isinstance(value, list | tuple) else []
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping) or not {"input", "output"} <= row.keys():
            raise InvalidInput(f"test {index} is {row!r:.60}; it must be an object with input and output")
        _check_keys(row, PAIR_KEYS, f"test {index} has")
    return rows, False


def _paired(value: Mapping[str, Any], inputs: Any, outputs: Any) -> list[Mapping[str, Any]]:
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple):
        raise InvalidInput(f"inputs and outputs are {inputs!r:.40} and {outputs!r:.40}; both must be lists")
    if len(inputs) != len(outputs):
        raise InvalidInput(
            f"the tests have {len(inputs)} inputs but {len(outputs)} outputs; write one output for each input"
        )
    rest = {key: value[key] for key in FURTHER_KEYS & value.keys()}
    return [{**rest, "input": each, "output": right} for each, right in zip(inputs, outputs, strict=True)]


def _check_keys(row: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    if unknown := sorted(map(str, row.keys() - known)):
        raise InvalidInput(
            f"{where} the key {unknown[0]!r}, which is unknown; the keys are {', '.join(sorted(known))}: remove it, or "
            "write the tests in another form"
        )


def _is_call(row: Mapping[str, Any]) -> bool:
    """Return whether a test calls a function. Its type determines this; without a type, its `fn_name` does."""
    kind = row.get("testtype") or row.get("type")
    if kind is None:
        return bool(row.get("fn_name"))
    if kind not in TYPES:
        raise InvalidInput(f"a test has the type {kind!r:.40}; the types are {', '.join(TYPES)}")
    return TYPES[kind]


def _calls(
    rows: Sequence[Mapping[str, Any]], *, wrapped: bool
) -> tuple[tuple[tuple[Any, ...], ...], tuple[tuple[Any, ...], ...]]:
    """Return the arguments and the expected values of each call. A text input has one argument a line as JSON, and its
    output is JSON too (LiveCodeBench, PRIME); other inputs and outputs are values. With `wrapped`, and for the type
    `function_call`, a value may be the only entry of a list, as in APPS, from which PRIME took its rows."""
    arguments, outputs = [], []
    for index, row in enumerate(rows):
        given, right = row["input"], row["output"]
        if isinstance(given, str):
            try:
                given = [json.loads(line) for line in given.strip().split("\n")] if given.strip() else []
            except (ValueError, RecursionError):
                raise InvalidInput(
                    f"the input of test {index} is {given!r:.60}; write the arguments of the call as a list, or each on a line as JSON"
                ) from None
            values = [_value_of(right)]
        else:
            values = [right]
            if isinstance(right, str) and right in WORDS:
                values.append(WORDS[right])
            may_be_wrapped = wrapped or row.get("type") == "function_call"
            if may_be_wrapped and isinstance(right, list | tuple) and len(right) == 1:
                values.append(right[0])
        arguments.append(tuple(given) if isinstance(given, list | tuple) else (given,))
        outputs.append(tuple(values))
    return tuple(arguments), tuple(outputs)


WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


def _value_of(text: Any) -> Any:
    """Return the value of an output, parsed as JSON, else as Python, else the text itself."""
    if not isinstance(text, str):
        return text
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return text


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return "".join(f"{_text(each)}\n" for each in value)
    if isinstance(value, int | float):
        return str(value)
    raise InvalidInput(f"an input or output is {value!r:.60}; it must be text or a list of lines")


def _texts(values: Any) -> tuple[str, ...]:
    texts = tuple(values) if isinstance(values, list | tuple) else ()
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidInput(f"test {index} is {text!r:.60}; it must be text")
        _check_python(text, f"test {index}")
    _check_count(len(texts))
    for index, text in enumerate(texts):
        if not any(isinstance(node, ast.Assert | ast.Call | ast.Raise) for node in ast.walk(ast.parse(text))):
            raise InvalidInput(
                f"test {index} is {text!r:.60}, which asserts nothing; write the test, not an encoding or a reference"
            )
    return texts


def _check_python(text: str, where: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text, where)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidInput(f"{where} is not Python: {error}") from None


def _files(value: Any) -> PytestFiles:
    files = value if isinstance(value, Mapping) else {f"test_{MODULE}.py": value}
    for name, content in files.items():
        if not isinstance(name, str) or not FILE_NAME.fullmatch(name) or name == f"{MODULE}.py":
            raise InvalidInput(f"{name!r:.60} is not the name of a test file; name the file test_….py")
        if not isinstance(content, str):
            raise InvalidInput(f"the test file {name} is {type(content).__name__}; it must be text")
    _check_count(len(files))
    return PytestFiles(dict(files))


def _check_count(count: int) -> None:
    if not 0 < count <= MAX_TESTS:
        raise InvalidInput(
            f"a row has {count} tests; write 1 to {MAX_TESTS}: texts with assert, objects with input and output, a text with "
            "check(candidate), or files of pytest"
        )


Compare = Literal["lines", "tokens", "decimals", "exact"]


def equal_outputs(found: str, right: str, compare: Compare = "lines", tolerance: float = 0.0) -> bool:
    """Return whether two outputs are equal. `exact` compares them unchanged, and `tokens` compares the words between
    white space. `lines` ignores white space at the ends of lines, and empty lines at the end. `decimals` ignores white
    space on both sides of lines, and also accepts the same numbers (LiveCodeBench's `grade_stdio`). Numbers may differ
    by `tolerance`, absolutely or relatively."""
    if compare == "exact":
        return found == right
    if compare == "decimals":
        lines, right_lines = ([line.strip() for line in text.strip().split("\n")] for text in (found, right))
        return len(lines) == len(right_lines) and all(map(_same_decimals, lines, right_lines))
    if compare == "tokens":
        return _equal_words(found.split(), right.split(), tolerance)
    lines, right_lines = _lines(found), _lines(right)
    if len(lines) != len(right_lines):
        return False
    if not tolerance:
        return lines == right_lines
    return all(_equal_words(a.split(" "), b.split(" "), tolerance) for a, b in zip(lines, right_lines, strict=True))


def equal_values(found: Any, right: Any, tolerance: float = 0.0) -> bool:
    """Return whether a function returned the expected value. As in JSON, a tuple equals a list, and keys of a mapping
    are texts; numbers and truth values are compared as in Python."""
    if isinstance(right, list | tuple):
        return (
            isinstance(found, list)
            and len(found) == len(right)
            and all(equal_values(a, b, tolerance) for a, b in zip(found, right, strict=True))
        )
    if isinstance(right, Mapping):
        rights = {str(key): value for key, value in right.items()}
        return (
            isinstance(found, dict)
            and found.keys() == rights.keys()
            and all(equal_values(value, rights[key], tolerance) for key, value in found.items())
        )
    if tolerance and isinstance(found, int | float) and isinstance(right, int | float):
        return _is_near(str(found), str(right), tolerance) or found == right
    return bool(found == right)


def _same_decimals(found: str, right: str) -> bool:
    if found == right:
        return True
    try:
        return [Decimal(word) for word in found.split()] == [Decimal(word) for word in right.split()]
    except ArithmeticError:  # a word that is not a number, or sNaN
        return False


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _equal_words(found: list[str], right: list[str], tolerance: float) -> bool:
    if len(found) != len(right):
        return False
    return all(a == b or _is_near(a, b, tolerance) for a, b in zip(found, right, strict=True))


def _is_near(found: str, right: str, tolerance: float) -> bool:
    if not tolerance:
        return False
    try:
        a, b = float(found), float(right)
    except ValueError:
        return False
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)

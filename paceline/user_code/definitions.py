"""Finds the functions and classes that a spec names in files of Python. A file is parsed and never run. A check passes if
the file is not on this machine, and for a definition with decorators, because decorators may change the definition."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable
from pathlib import Path

from paceline.errors import InvalidInput, SpecError
from paceline.host.regular_file import read_named
from paceline.spec import RunSpec

MAX_SOURCE_BYTES = 1 << 20
"""Size, in bytes, of the largest file that is parsed."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


def check_code(spec: RunSpec) -> None:
    """Check that the files of the rewards and the environment have what the spec names. Raises InvalidInput."""
    for index, reward in enumerate(spec.rewards):
        if ":" in reward.function:
            defined(f"rewards.{index}", reward.function, "function")
    section = spec.environment
    for name, code in section.classes.items() if section.class_ else ():
        defined(f"environment.class.{name}" if name else "environment.class", code, "class")
    for index, tool in enumerate(section.tools):
        defined(f"environment.tools.{index}", tool, "function")
    for key in ("agent", "train_call"):
        if code := getattr(section, key):
            defined(f"environment.{key}", code, "function")


def defined(key: str, code: str, kind: str) -> Definition | None:
    """Return the definition `file:name`; None if this machine cannot read it. Raises InvalidInput if the file lacks it."""
    path, colon, name = code.rpartition(":")
    if not colon or not path or not name.isidentifier():
        raise InvalidInput(f"{key} is {code!r:.80}; write it as path/to/file.py:name, with the name of a {kind}")
    module = parsed(Path(path).expanduser())
    names = None if module is None else names_of(module)
    if module is None or names is None:
        return None
    if name not in names:
        nearest = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise SpecError(f"{key}: {path} has no {kind} {name!r}{hint}")
    return definition_of(module.body, name)


def parsed(path: Path) -> ast.Module | None:
    """Return a Python file's syntax tree; None if this machine cannot read it: the worker then reports the fault."""
    try:
        if path.stat().st_size > MAX_SOURCE_BYTES:
            return None
        return ast.parse(read_named(path))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def names_of(module: ast.Module) -> set[str] | None:
    """Return all names that a module's own statements may bind; None if an import with `*` may bind any."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    names |= {name for node in module.body for name in _bound(node)}
    return None if "*" in names else names


def definition_of(body: Iterable[ast.stmt], name: str) -> Definition | None:
    """Return the function or class to which `name` refers at the end of a module or class; None if it has decorators,
    or if a later statement may have rebound the name."""
    found: Definition | None = None
    for node in body:
        if isinstance(node, Definition) and node.name == name:
            found = node
        elif name in _bound(node):
            found = None
    return None if found is None or found.decorator_list else found


def required(function: Function) -> list[str]:
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    needed = positional[: len(positional) - len(given.defaults)]
    needed += [a for a, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
    return [argument.arg for argument in needed]


def _bound(statement: ast.stmt) -> set[str]:
    return {
        node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    } | {node.name for node in ast.walk(statement) if isinstance(node, Definition)}

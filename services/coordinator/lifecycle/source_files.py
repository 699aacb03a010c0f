"""What a user's Python file defines, and which arguments that needs. Files are parsed, not run; nothing is known of a definition
with decorators, which may change it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

MAX_SOURCE_BYTES = 1 << 20
"""Largest file that is read here."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


def parsed(path: Path) -> ast.Module | None:
    """Return the module of a file; None where it cannot be read here: the worker says what is wrong with it."""
    try:
        if path.stat().st_size > MAX_SOURCE_BYTES:
            return None
        return ast.parse(path.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def names_of(module: ast.Module) -> set[str] | None:
    """Return all names that a module's own statements may bind; None where a `*` may bind any."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    names |= {name for node in module.body for name in _bound(node)}
    return None if "*" in names else names


def definition(body: Iterable[ast.stmt], name: str) -> Definition | None:
    """Return the function or class that `name` stands for at the end of a module or class; None where something else may have
    bound the name since, and for one with decorators."""
    found: Definition | None = None
    for node in body:
        if isinstance(node, Definition) and node.name == name:
            found = node
        elif name in _bound(node):
            found = None
    return None if found is None or found.decorator_list else found


def required(function: Function) -> list[str]:
    """Return the arguments of a function that have no default."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    needed = positional[: len(positional) - len(given.defaults)]
    needed += [a for a, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
    return [argument.arg for argument in needed]


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement may bind anew."""
    return {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    } | {node.name for node in ast.walk(statement) if isinstance(node, Definition)}

"""The reward functions of a script as a file: their source, with the definitions, constants and imports that they use.

Promise: the script is not run, and the file imports nothing that the functions do not use. A reward worker that loads the
file therefore needs neither the training library nor a guard around `trainer.train()`.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator


def reward_source(text: str, tree: ast.Module, functions: Iterable[str]) -> tuple[str, list[str]]:
    """Return the file's text for functions at the top of the script, and names that they use and the script does not define
    at its top. `text` is the script's source and `tree` its syntax tree.
    """
    defined = dict(_definitions(tree))
    wanted: set[int] = set()
    missing: list[str] = []
    queue, seen = list(functions), set[str]()
    while queue:
        name = queue.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in defined:
            index = defined[name]
            if index not in wanted:
                wanted.add(index)
                if not isinstance(tree.body[index], ast.Import | ast.ImportFrom):
                    queue += _names_read(tree.body[index])
        elif not hasattr(builtins, name):
            missing.append(name)
    future = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    parts = [ast.unparse(node) for node in future]
    for index in sorted(wanted):
        node = tree.body[index]
        if isinstance(node, ast.Import | ast.ImportFrom):
            node = _only(node, seen)
            parts.append(ast.unparse(node))
        else:
            parts.append(_source(text, node))
    return "\n\n".join(parts) + "\n", sorted(missing)


def _definitions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the names that the statements at the top define, with the statement's index; the last one of a name wins."""
    for index, node in enumerate(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, index
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], index
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        yield part.id, index


def _names_read(node: ast.AST) -> list[str]:
    """Return the names that a statement reads and does not bind itself: arguments and local variables are not names of
    the script."""
    walked = list(ast.walk(node))
    read = {part.id for part in walked if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}
    bound = {part.id for part in walked if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load)}
    bound |= {part.arg for part in walked if isinstance(part, ast.arg)}
    bound |= {part.name for part in walked if isinstance(part, ast.ExceptHandler) and part.name}
    for part in walked:
        if isinstance(part, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name.partition(".")[0] for alias in part.names}
        elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(part.name)
    declared = {name for part in walked if isinstance(part, ast.Global) for name in part.names}
    return sorted((read - bound) | declared)


def _only(node: ast.Import | ast.ImportFrom, used: set[str]) -> ast.Import | ast.ImportFrom:
    """Return an import of those names alone that are used."""
    names = [
        alias
        for alias in node.names
        if (alias.asname or alias.name.partition(".")[0]) in used or alias.name == "*"
    ]
    if isinstance(node, ast.Import):
        return ast.Import(names=names)
    return ast.ImportFrom(module=node.module, names=names, level=node.level)


def _source(text: str, node: ast.stmt) -> str:
    """Return a statement as it is written in the script, with its decorators."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])

"""Each part of the exchange's state has one owner: only its class changes it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import paceline.services.coordinator

FOLDER = Path(paceline.services.coordinator.__path__[0])
OWNERS = {"Exchange", "RunState", "Workers", "Throughput", "Notices"}
HOLDERS = ("exchange", "_exchange", "active", "state", "workers", "throughput", "notices")
"""Last names of expressions that are an owner, or the active run, which holds one."""
CONTAINERS = ("dict", "set", "list", "defaultdict")
CHANGES = {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove"}
CHANGES |= {"setdefault", "sort", "update"}
"""Methods of Python's containers that change them."""


def owned_fields() -> tuple[set[str], set[str]]:
    """Return the fields of all owners, and those that are containers."""
    fields, containers = set(), set()
    for path in (FOLDER / "exchange").glob("*.py"):
        for owner in ast.walk(ast.parse(path.read_text())):
            if isinstance(owner, ast.ClassDef) and owner.name in OWNERS:
                for node in ast.walk(owner):
                    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                        fields.add(node.attr)
                    if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith(CONTAINERS):
                        containers.add(ast.unparse(node.target).removeprefix("self."))
    return fields, containers


FIELDS, CONTAINED = owned_fields()


def changes(source: str) -> Iterator[str]:
    """Yield each line of `source` that changes a field of an owner from outside, also by another name of the field."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in OWNERS:
            node.body.clear()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            aliases = {
                target.id
                for node in ast.walk(function)
                if isinstance(node, ast.Assign)
                for target, value in pairs(node)
                if isinstance(target, ast.Name) and is_owned(value, CONTAINED, set())
            }
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                    found = is_owned(node, FIELDS, set())
                elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                    found = is_owned(node, FIELDS, aliases)
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
                    found = is_owned(node.func.value, CONTAINED, aliases)
                else:
                    continue
                if found:
                    yield ast.unparse(node)


def pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def is_owned(node: ast.expr, fields: set[str], aliases: set[str]) -> bool:
    """Return whether an expression is a field of an owner, or a part of one."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Name):
        return node.id in aliases
    if not isinstance(node, ast.Attribute):
        return False
    holder = ast.unparse(node.value).rpartition(".")[2]
    return is_owned(node.value, fields, aliases) or (holder in HOLDERS and node.attr in fields)


def test_a_change_from_outside_is_found() -> None:
    before = "def f(exchange, run):\n    "
    for line in (
        "exchange.active = run",
        "self._exchange.admission_closed, other = '', 1",
        "run.state.yields_to = ''",
        "self._exchange.active.state.training = None",
        "exchange.workers.versions[1] += 2",
        "del exchange.workers.versions[1]",
        "exchange.workers.suspected.add(1)",
        "exchange.workers.throughput.scored['a'] = 1",
        "run.state.drops_in_a_row.first_group = 1",
        "run.state.first_requested_s.setdefault(1, 2)",
        "reserved = run.state.reserved\n    reserved.pop(1)",
    ):
        assert list(changes(before + line)), line
    for line in (
        "self._exchange = exchange",
        "exchange.notices.add('paused')",
        "exchange.ledger.receipts.add(1)",
        "run.state.drops_in_a_row.add(1)",
        "held = set(exchange.workers.overdue)\n    held.add(1)",
        "class Workers:\n        def g(self):\n            self.workers.versions.clear()",
    ):
        assert not list(changes(before + line)), line


def test_only_owners_change_their_fields() -> None:
    assert {"active", "yields_to", "versions", "reserved", "admission_closed"} <= FIELDS
    assert {"versions", "reserved", "suspected", "generated"} <= CONTAINED
    found = {
        f"{path.relative_to(FOLDER)}: {line}"
        for path in sorted(FOLDER.rglob("*.py"))
        for line in changes(path.read_text())
    }
    assert found == set()

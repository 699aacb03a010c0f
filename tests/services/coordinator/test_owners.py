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
CHANGES |= {"setdefault", "sort", "reverse", "move_to_end", "extendleft", "update", "intersection_update"}
CHANGES |= {"difference_update", "symmetric_difference_update"}
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
    """Yield each line of `source` that changes a field of an owner other than `self`, also by another name of the owner
    or of the field in the same function. Names that a call, an argument or an attribute passes on are not followed."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            bound = [(name, value) for name, value in bindings(function) if isinstance(name, ast.Name)]
            holders = {*HOLDERS, *(name.id for name, value in bound if last_name(value) in HOLDERS)}
            aliases = {name.id for name, value in bound if is_owned(value, CONTAINED, set(), holders)}
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                    found = is_owned(node, FIELDS, set(), holders)
                elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                    found = is_owned(node, FIELDS, aliases, holders)
                elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                    found = node.target.id in aliases
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
                    found = is_owned(node.func.value, CONTAINED, aliases, holders)
                else:
                    continue
                if found:
                    yield ast.unparse(node)


def bindings(function: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each target of an assignment or a loop over a tuple, with its value."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(target.elts, node.value.elts, strict=False)
                else:
                    yield target, node.value
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            yield node.target, node.value
        elif isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple):
            yield from ((node.target, value) for value in node.iter.elts)


def last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_owned(node: ast.expr, fields: set[str], aliases: set[str], holders: set[str]) -> bool:
    """Return whether an expression is a field of an owner, or a part of one."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Name):
        return node.id in aliases
    if not isinstance(node, ast.Attribute):
        return False
    is_field = last_name(node.value) in holders and node.attr in fields
    return is_field or is_owned(node.value, fields, aliases, holders)


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
        "overdue: set[str] = exchange.workers.overdue\n    overdue |= {1}",
        "for ids in (exchange.workers.overdue, exchange.workers.suspected):\n        ids.difference_update({1})",
        "if versions := exchange.workers.versions:\n        versions.clear()",
        "state = run.state\n    state.yields_to = ''",
        "workers = self._exchange.workers\n    workers.overdue.add(1)",
        "class Exchange:\n        def g(self):\n            self.active.state.reserved.pop(1)",
    ):
        assert list(changes(before + line)), line
    for line in (
        "self._exchange = exchange",
        "exchange.notices.add('paused')",
        "exchange.ledger.receipts.add(1)",
        "run.state.drops_in_a_row.add(1)",
        "held = set(exchange.workers.overdue)\n    held.add(1)",
        "class Workers:\n        def g(self):\n            self.versions.clear()",
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

"""The states of a group and the SQL on groups are the ledger's; the audit and the plan of a replay read them beside it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from services.coordinator.ledger.groups import State

ROOT = Path(__file__).resolve().parents[4]
ALLOWED = ("services/coordinator/ledger/", "services/coordinator/audit/", "services/replay/plan.py")
SQL_ON_GROUPS = re.compile(r"\b(FROM|JOIN|INTO|UPDATE)\s+groups\b")


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((ROOT / "services").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(ALLOWED):
            yield name, ast.parse(path.read_text())


def constants(node: ast.AST) -> Iterator[ast.Constant]:
    return (part for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str))


def test_only_the_ledger_has_sql_on_groups() -> None:
    found = [
        f"{name}:{constant.lineno}"
        for name, module in modules()
        for constant in constants(module)
        if SQL_ON_GROUPS.search(str(constant.value))
    ]
    assert found == []


def test_states_are_compared_as_members_of_the_enumeration() -> None:
    found = [
        f"{name}:{constant.lineno}: {constant.value}"
        for name, module in modules()
        for compare in ast.walk(module)
        if isinstance(compare, ast.Compare)
        for constant in constants(compare)
        if constant.value in set(State)
    ]
    assert found == []

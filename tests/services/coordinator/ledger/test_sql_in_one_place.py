"""SQL and the states of a group belong to the ledger; only the audit and the plan of a replay have SQL beside it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.coordinator.ledger.groups import State

ROOT = Path(__file__).resolve().parents[4]
PACKAGES = ("paceline", "services", "rollout", "reward", "learner", "protos")
ALLOWED = ("services/coordinator/ledger/", "services/coordinator/audit/", "services/replay/plan.py")
STATEMENT = re.compile(
    r"\s*((SELECT|WITH)\s"
    r"|(INSERT|REPLACE)(\s+OR\s+\w+)?\s+INTO\s|UPDATE\s+\S+(\s+INDEXED\s+BY\s+\w+)?\s+SET\s|DELETE\s+FROM\s"
    r"|(CREATE|DROP|ALTER)\s+(TEMP\s+|UNIQUE\s+)?(TABLE|INDEX|TRIGGER|VIEW)\s"
    r"|(PRAGMA|SAVEPOINT|RELEASE|ATTACH|DETACH|REINDEX)\s+\w"
    r"|(BEGIN|COMMIT|ROLLBACK|VACUUM|ANALYZE)\b)"
)
"""Start of an SQL statement. In capitals, as all statements are written here, so that no sentence is taken for one."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(ALLOWED):
                yield name, ast.parse(path.read_text())


def constants(node: ast.AST) -> Iterator[ast.Constant]:
    return (part for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str))


def test_only_the_ledger_has_sql() -> None:
    found = [
        f"{name}:{constant.lineno}"
        for name, module in modules()
        for constant in constants(module)
        if STATEMENT.match(str(constant.value))
    ]
    assert found == []


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1",
        "\nWITH a AS (SELECT 1) SELECT * FROM a",
        "INSERT OR REPLACE INTO a VALUES (?)",
        "UPDATE a INDEXED BY b SET c = 1",
        "UPDATE groups SET state = 'a'",
        "DELETE FROM a",
        "PRAGMA user_version",
        "SAVEPOINT part",
        "BEGIN IMMEDIATE",
        "CREATE TEMP TRIGGER t",
    ],
)
def test_statements_are_recognized(sql: str) -> None:
    assert STATEMENT.match(sql)


def test_states_are_compared_as_members_of_the_enumeration() -> None:
    found = [
        f"{name}:{constant.lineno}: {constant.value}"
        for name, module in modules()
        if name.startswith("services/")
        for compare in ast.walk(module)
        if isinstance(compare, ast.Compare)
        for constant in constants(compare)
        if constant.value in set(State)
    ]
    assert found == []

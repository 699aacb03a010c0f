"""Only the ledger has its SQL and compares states of groups; exceptions are the audit, the records' answers and the
replay plan. A database of another purpose belongs to one module, which uses none of the ledger's tables."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.services.coordinator.ledger.groups import State

ROOT = Path(__file__).resolve().parents[4]
PACKAGES = ("paceline", "apps", "services", "rollout", "reward", "learner", "weights", "protos")
ALLOWED = (
    *("services/coordinator/ledger/", "services/coordinator/audit/", "services/coordinator/records/"),
    "services/replay/plan.py",
)
OTHER_DATABASES = ("reward/endpoints/cache.py",)
"""Modules with another SQLite file than the ledger; nothing of a run depends on it."""
STATEMENT = re.compile(
    r"\s*((SELECT|WITH)\s"
    r"|(INSERT|REPLACE)(\s+OR\s+\w+)?\s+INTO\s|UPDATE\s+\S+(\s+INDEXED\s+BY\s+\w+)?\s+SET\s|DELETE\s+FROM\s"
    r"|(CREATE|DROP|ALTER)\s+(TEMP\s+|UNIQUE\s+)?(TABLE|INDEX|TRIGGER|VIEW)\s"
    r"|(PRAGMA|SAVEPOINT|RELEASE|ATTACH|DETACH|REINDEX)\s+\w"
    r"|(BEGIN|COMMIT|ROLLBACK|VACUUM|ANALYZE)\b)"
)
"""Start of an SQL statement. In capitals, like all statements in this tree, so that sentences do not match."""


SQL = re.compile(
    r"\b(SELECT|WITH|INTO|SET|FROM|TABLE|INDEX|TRIGGER|VIEW|PRAGMA|SAVEPOINT|RELEASE|ATTACH|DETACH|REINDEX|BEGIN)\b"
    r"|\b(COMMIT|ROLLBACK|VACUUM|ANALYZE)\b"
)
"""Words in modules with statements; other modules need not be parsed."""


@functools.cache
def sources() -> dict[str, str]:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def modules(words: re.Pattern[str], folder: str = "") -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules outside of ALLOWED whose text has one of the words."""
    for name, text in sources().items():
        if name.startswith(folder) and not name.startswith(ALLOWED) and words.search(text):
            yield name, ast.parse(text)


def constants(node: ast.AST) -> Iterator[ast.Constant]:
    return (part for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str))


def test_only_the_ledger_has_sql() -> None:
    found = [
        f"{name}:{constant.lineno}"
        for name, module in modules(SQL)
        for constant in constants(module)
        if STATEMENT.match(str(constant.value)) and name not in OTHER_DATABASES
    ]
    assert found == []


def test_other_databases_know_none_of_the_ledgers_tables() -> None:
    folder = ROOT / "services" / "coordinator" / "ledger"
    tables = {
        table
        for path in folder.rglob("*.py")
        for table in re.findall(r"CREATE TABLE (?:IF NOT EXISTS )?(\w+)", path.read_text())
    }
    assert {"groups", "batches", "receipts"} <= tables
    for name in OTHER_DATABASES:
        module = ast.parse(sources()[name])
        statements = [str(each.value) for each in constants(module) if STATEMENT.match(str(each.value))]
        assert statements, f"{name} has no SQL any more"
        assert [sql for sql in statements if tables & set(re.findall(r"\w+", sql))] == []


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
    assert SQL.search(sql)


def test_states_are_compared_as_members_of_the_enumeration() -> None:
    states = re.compile(rf"[\"']({'|'.join(State)})[\"']")
    found = [
        f"{name}:{constant.lineno}: {constant.value}"
        for name, module in modules(states, "services/")
        for compare in ast.walk(module)
        if isinstance(compare, ast.Compare)
        for constant in constants(compare)
        if constant.value in set(State)
    ]
    assert found == []

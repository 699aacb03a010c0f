"""Seals the ledger's rows with checksums, so that a row changed by the disk no longer matches its checksum.

SQLite writes no checksums into its pages. Rows that no other checksum covers have one in the column `seal`: CRC-32 over
all other columns. Triggers of the writer's connection set it, so no statement has to; the triggers are not in the file,
so a row changed by another program is detected too. Groups are sealed when they are trained or dropped, by the
statements that end them (`assignment`). Before that they change several times, and a trigger would double the cost of
each change; their state is compared with other records instead.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from collections.abc import Mapping
from typing import NamedTuple
from zlib import crc32

from paceline.services.coordinator.ledger.schema import SCHEMA

SEALED = {
    "meta": "",
    "runs": "",
    "groups": "{row}.state IN ('trained', 'dropped')",
    "prompts": "",
    "counters": "",
    "batches": "",
    "replaced_batches": "",
    "session_faults": "",
    "receipts": "",
    "checkpoints": "",
    "evaluations": "",
    "events": "",
    "episodes": "",
    "restarts": "",
    "audit_heads": "",
    "models": "",
    "model_changes": "",
}
"""Condition under which a row has a seal. The key is the table; the condition is empty if every row has a seal."""

UNSEALED = {"runs": {"cursor", "next_slot"}, "episodes": {"header", "arrays", "segment", "start"}}
"""Columns that the seal does not cover. The key is the table. In `runs` these columns change with every lease, and
verify compares them with the groups; in `episodes` a backup changes them, and they have separate checksums."""


class Table(NamedTuple):
    name: str
    columns: tuple[str, ...]
    """Sealed columns, ordered by name, because an upgrade appends columns."""
    key: tuple[str, ...]


@functools.cache
def tables() -> dict[str, Table]:
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SCHEMA)
        names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        by_name = {}
        for name in names:
            info = db.execute(f"PRAGMA table_info({name})").fetchall()
            columns = {column[1] for column in info} - {"seal"} - UNSEALED.get(name, set())
            key = tuple(column[1] for column in sorted(info, key=lambda c: int(c[5])) if column[5])
            by_name[name] = Table(name, tuple(sorted(columns)), key)
        return by_name


def checksum(*values: object) -> int:
    """Return the checksum of a row's values in column order, in ASCII so that all versions of Python agree."""
    return crc32(ascii(values).encode())


def of(name: str, row: Mapping[str, object]) -> int:
    """Return the seal for a row to be inserted; this is cheaper than the trigger."""
    return checksum(*(row[column] for column in tables()[name].columns))


def assignment(**changed: str) -> str:
    """Return the assignment of `seal` for an UPDATE of `groups`; `changed` has the new expressions by column."""
    columns = tables()["groups"].columns
    return f"seal = row_checksum({', '.join(changed.get(column, column) for column in columns)})"


def install(db: sqlite3.Connection) -> None:
    """Register the checksum function with a connection; `keep` adds the triggers."""
    db.create_function("row_checksum", -1, checksum, deterministic=True)


def keep(db: sqlite3.Connection) -> None:
    """Add triggers that seal each row that the connection inserts or updates, in tables whose rows are always
    sealed."""
    for name in (name for name, condition in SEALED.items() if not condition):
        table = tables()[name]
        of_key = " AND ".join(f"{column} = NEW.{column}" for column in table.key)
        value = f"row_checksum({', '.join(f'NEW.{column}' for column in table.columns)})"
        update = f"UPDATE OF {', '.join(table.columns)}"  # not the seal itself
        for event, when in (("INSERT", "WHEN NEW.seal IS NULL"), (update, "")):
            db.execute(
                f"CREATE TEMP TRIGGER seal_{name}_{event[:6].lower()} AFTER {event} ON main.{name} {when}"
                f" BEGIN UPDATE {name} SET seal = {value} WHERE {of_key}; END"
            )

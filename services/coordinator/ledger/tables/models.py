"""Stores registered models and the changes of their aliases: the tables `models` and `model_changes`."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.services.coordinator.ledger.database import Queries
from paceline.services.coordinator.ledger.tables.checkpoints import resolved, stored

MAX_CHANGES = 1000
"""Largest number of a model's changes that are read: the newest ones."""


class ModelVersion(NamedTuple):
    name: str
    version: int
    run_id: str
    session: int
    step: int
    chain: str
    path: str
    """Absolute path or URL of the model's files."""
    export_sha256: str
    statement_sha256: str
    spec_sha256: str
    data: str
    code: str
    parent: str
    evaluations: Sequence[Mapping[str, Any]]
    verdicts: Sequence[Mapping[str, Any]]
    stage: str
    registered_by: str
    registered_s: float


class ModelChange(NamedTuple):
    sequence: int
    kind: str
    alias: str
    version: int
    previous: int
    reason: str
    caller: str
    changed_s: float


class RegisteredModels(Queries):
    """Registered models by name and version, changes by name and sequence. Call changing methods in a transaction."""

    def __init__(self, db: sqlite3.Connection, folder: Path):
        super().__init__(db)
        self._folder = folder

    def add(self, model: ModelVersion) -> None:
        values = model._asdict() | {
            "path": stored(self._folder, model.path),
            "evaluations": json.dumps(model.evaluations),
            "verdicts": json.dumps(model.verdicts),
        }
        self.db.execute(
            f"INSERT INTO models ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})", list(values.values())
        )

    def get(self, name: str, version: int) -> ModelVersion | None:
        """Return a version of a model; None if it does not exist."""
        row = self.row("SELECT * FROM models WHERE name = ? AND version = ?", (name, version))
        return None if row is None else self.from_row(row)

    def newest(self, name: str) -> int:
        """Return the number of a model's newest version; 0 if there is none."""
        return int(self.value("SELECT MAX(version) AS newest FROM models WHERE name = ?", (name,)) or 0)

    def after(self, name: str, version: int, limit: int, only: str = "") -> list[ModelVersion]:
        """Return the versions after a given one, by name and, for each name, the newest first. With `only`, return the
        versions of this one model."""
        rows = self.rows(
            "SELECT * FROM models WHERE (name > ?1 OR (name = ?1 AND version < ?2)) AND (?3 = '' OR name = ?3)"
            " ORDER BY name, version DESC LIMIT ?4",
            (name, version, only, limit),
        )
        return [self.from_row(row) for row in rows]

    def of_run(self, run_id: str) -> list[ModelVersion]:
        rows = self.rows("SELECT * FROM models WHERE run_id = ? ORDER BY name, version", (run_id,))
        return [self.from_row(row) for row in rows]

    def set_stage(self, name: str, version: int, stage: str) -> None:
        self.db.execute("UPDATE models SET stage = ? WHERE name = ? AND version = ?", (stage, name, version))

    # Aliases

    def holder(self, name: str, alias: str) -> int:
        """Return the number of the version that has an alias; 0 for none."""
        row = self.row(
            "SELECT version FROM model_changes WHERE name = ? AND alias = ? ORDER BY sequence DESC LIMIT 1",
            (name, alias),
        )
        return 0 if row is None else int(row["version"])

    def aliases(self, name: str) -> dict[str, int]:
        """Return the aliases of a model. The key is the alias; the value is the number of its version."""
        rows = self.db.execute(
            "SELECT alias, version FROM model_changes c WHERE name = ? AND sequence ="
            " (SELECT MAX(sequence) FROM model_changes WHERE name = c.name AND alias = c.alias) ORDER BY alias",
            (name,),
        )
        return {row["alias"]: row["version"] for row in rows}

    def changes(self, name: str) -> list[ModelChange]:
        """Return the newest changes of a model's aliases, oldest first."""
        rows = self.rows(
            f"SELECT {', '.join(ModelChange._fields)} FROM model_changes WHERE name = ? ORDER BY sequence DESC LIMIT ?",
            (name, MAX_CHANGES),
        )
        return [ModelChange(*row) for row in reversed(rows)]

    def promotion(self, name: str, alias: str, version: int) -> ModelChange | None:
        """Return the newest promotion of a version to an alias."""
        row = self.row(
            f"SELECT {', '.join(ModelChange._fields)} FROM model_changes WHERE name = ? AND alias = ? AND version = ?"
            " AND kind = 'promote' ORDER BY sequence DESC LIMIT 1",
            (name, alias, version),
        )
        return None if row is None else ModelChange(*row)

    def add_change(self, name: str, change: ModelChange) -> None:
        """Record a change with the next sequence number; the number in `change` is ignored."""
        self.db.execute(
            "INSERT INTO model_changes (name, sequence, kind, alias, version, previous, reason, caller, changed_s)"
            " SELECT ?, COALESCE(MAX(sequence), 0) + 1, ?, ?, ?, ?, ?, ?, ? FROM model_changes WHERE name = ?",
            (name, *change[1:], name),
        )

    def from_row(self, row: sqlite3.Row) -> ModelVersion:
        values = {field: row[field] for field in ModelVersion._fields}
        values["path"] = resolved(self._folder, row["path"])
        values |= {field: json.loads(row[field]) for field in ("evaluations", "verdicts")}
        return ModelVersion(**values)

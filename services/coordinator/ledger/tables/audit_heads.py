"""Stores the newest record of each file of the audit log: the table `audit_heads`. The table is outside the chain of
batches, which a replay has to repeat. If the end of the log was cut off, or if the log was replaced by an older copy,
it lacks the record that is named here."""

from __future__ import annotations

from typing import NamedTuple

from paceline.services.coordinator.ledger.database import Queries


class AuditHead(NamedTuple):
    """Newest record of the audit log at the time when it was stored."""

    sequence: int
    """Number of the record; 0 if there is none."""
    hash: str
    """SHA-256 over the record and all earlier ones, in hexadecimal digits."""


NONE = AuditHead(0, "")


class AuditHeads(Queries):
    """Table `audit_heads`; a row's key is the number of the file. Call changing methods inside a transaction."""

    def put(self, file: int, head: AuditHead) -> None:
        """Store the newest record of a file, in place of an earlier one."""
        self.db.execute("INSERT OR REPLACE INTO audit_heads (file, sequence, hash) VALUES (?, ?, ?)", (file, *head))

    def newest(self) -> AuditHead:
        """Return the newest record of all files; `NONE` without any."""
        row = self.row("SELECT sequence, hash FROM audit_heads WHERE file = (SELECT MAX(file) FROM audit_heads)")
        return NONE if row is None else AuditHead(row["sequence"], row["hash"])

    def all(self) -> dict[int, AuditHead]:
        """Return the newest record of each file, by the file's number, ascending."""
        rows = self.db.execute("SELECT file, sequence, hash FROM audit_heads ORDER BY file")
        return {row["file"]: AuditHead(row["sequence"], row["hash"]) for row in rows}

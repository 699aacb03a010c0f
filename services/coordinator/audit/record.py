"""The rows of one run that several comparisons of `paceline ledger verify` read."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.spec import RunSpec


@dataclass(frozen=True)
class Record:
    """The rows of one run that more than one comparison reads."""

    ledger: Ledger
    run: sqlite3.Row
    spec: RunSpec
    counters: dict[str, int]
    groups: list[sqlite3.Row]
    """Training groups, without their texts, by id."""
    batches: list[sqlite3.Row]
    of_step: dict[int, list[sqlite3.Row]]
    """Groups that carry a step, in the order of its batch."""
    deep: bool
    """True when the contents of every checkpoint are read, not of the newest alone."""

    @property
    def db(self) -> sqlite3.Connection:
        """The ledger's connection, in one snapshot."""
        return self.ledger.db

    @property
    def run_id(self) -> str:
        """The run."""
        return str(self.run["run_id"])

    @property
    def has_batches(self) -> bool:
        """Return whether the exchange makes this run's batches; a supervised learner reads its data itself."""
        return self.spec.samples

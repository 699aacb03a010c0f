"""Runs that are in the ledger when `paceline up` begins: those that go on, and those that need a person."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from paceline.client import ENDED_STATES
from paceline.errors import NotFound, SpecError
from paceline.spec import RunSpec

MAX_SHOWN = 5
"""Number of failed runs that are listed, newest first."""


class Failed(NamedTuple):
    """A failed run, as in the ledger."""

    why: str
    spec_yaml: str


@dataclass
class LeftRuns:
    """Runs by id, oldest first."""

    open: dict[str, RunSpec] = field(default_factory=dict)
    """Runs that have not ended."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Runs that have not ended and whose spec this version cannot read, with the reason and what helps."""
    failed: dict[str, Failed] = field(default_factory=dict)
    """Runs that `resume` would queue again."""
    events: dict[str, int] = field(default_factory=dict)
    """Sequence number of the newest event of each of these runs."""

    def advice(self, resumed: Sequence[str] = ()) -> list[str]:
        """Return a sentence for each run that needs a person, without those that are `resumed` now."""
        failed = [(run_id, failed_run) for run_id, failed_run in self.failed.items() if run_id not in resumed]
        newest = failed[: -MAX_SHOWN - 1 : -1]
        sentences = [
            *self.unreadable.values(),
            *(
                f"run {run_id} has failed ({failed_run.why}); --resume {run_id} queues it again"
                for run_id, failed_run in newest
            ),
        ]
        if len(failed) > MAX_SHOWN:
            sentences.append(f"{len(failed) - MAX_SHOWN} older runs have failed too")
        return sentences

    def chosen(self, run_id: str) -> RunSpec:
        """Return the spec of a run that is to be resumed. Raises NotFound, SpecError."""
        from paceline.spec.reading import spec_of_run

        if run_id in self.failed:
            return spec_of_run(run_id, self.failed[run_id].spec_yaml)[0]
        if run_id in self.unreadable:
            raise SpecError(self.unreadable[run_id])
        if run_id in self.open:
            return self.open[run_id]
        run_ids = ", ".join([*self.open, *self.failed]) or "none"
        raise NotFound(f"no run {run_id!r} has failed or is open; those that are: {run_ids}")


def left_runs(ledger_path: Path) -> LeftRuns:
    """Return the runs in the ledger; none without a ledger. Raises LedgerFault."""
    from paceline.services.coordinator.ledger.file_check import explained
    from paceline.services.coordinator.ledger.ledger import Ledger
    from paceline.spec.reading import spec_of_run

    left = LeftRuns()
    try:
        ledger = Ledger(ledger_path, read_only=True)
    except NotFound:
        return left
    with contextlib.closing(ledger), explained(ledger.db, ledger.path):
        for row in ledger.runs():
            run_id = row["run_id"]
            if row["state"] == "failed" or row["state"] not in ENDED_STATES:
                left.events[run_id] = ledger.last_sequence(run_id)
            if row["state"] == "failed":
                left.failed[run_id] = Failed(row["message"], row["spec_yaml"])
            elif row["state"] not in ENDED_STATES:
                try:
                    left.open[run_id] = spec_of_run(run_id, row["spec_yaml"])[0]
                except SpecError as error:
                    left.unreadable[run_id] = str(error)
    return left

"""Runs as their directory records them, for commands that need no coordinator.

`RecordedRuns` answers as `paceline.client.Client` does, from the ledger of a directory. A ledger is opened read-only, so a
coordinator that works there is not disturbed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.client import Client, Event
from paceline.errors import Unavailable
from paceline.files.names import LEDGER_NAME
from services.cli.recorded.opening import opened_ledger

if TYPE_CHECKING:
    from protos.paceline.v1.run_pb2 import Run
    from services.coordinator.ledger.ledger import Ledger

EVENTS_AT_ONCE = 1000
DEFAULT_DIRECTORY = Path("runs")


class RecordedRuns:
    """The runs of one ledger."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger

    def runs(self) -> list[Run]:
        """Return all runs, oldest first."""
        return [self.get(row["run_id"]) for row in self._ledger.runs()]

    def get(self, run_id: str) -> Run:
        """Return a run. Raises NotFound."""
        from services.coordinator.reporting.run_messages import run_message

        return run_message(self._ledger, self._ledger.run(run_id))

    def watch(self, run_id: str, after: int = 0) -> Iterator[Event]:
        """Yield the recorded events of a run after a sequence number, oldest first. Raises NotFound."""
        self._ledger.run(run_id)
        while rows := self._ledger.events(run_id, after, EVENTS_AT_ONCE):
            for row in rows:
                after = row["sequence"]
                yield Event(after, row["kind"], json.loads(row["json"]))


@contextlib.contextmanager
def runs_of(coordinator: str, directory: Path | None) -> Iterator[Client | RecordedRuns]:
    """Give the runs of `directory` or, without one, of the coordinator.

    When nobody named a coordinator and none answers, the default directory is read, if it has a ledger, and a line says
    so. Raises Unavailable, NotFound.
    """
    if directory is not None:
        with opened_ledger(directory / LEDGER_NAME) as ledger:
            yield RecordedRuns(ledger)
        return
    with Client(coordinator) as client:
        if not _may_read_directory() or _answers(client):
            yield client
            return
    click.echo(
        f"no coordinator answers at {coordinator}; this is what {DEFAULT_DIRECTORY} has on record", err=True
    )
    with opened_ledger(DEFAULT_DIRECTORY / LEDGER_NAME) as ledger:
        yield RecordedRuns(ledger)


def _may_read_directory() -> bool:
    source = click.get_current_context().get_parameter_source("coordinator")
    return source == click.core.ParameterSource.DEFAULT and (DEFAULT_DIRECTORY / LEDGER_NAME).is_file()


def _answers(client: Client) -> bool:
    try:
        client.members()
    except Unavailable:
        return False
    return True

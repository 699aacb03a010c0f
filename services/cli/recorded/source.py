"""Where the commands on records read them: a ledger on this machine, or a coordinator anywhere.

`--coordinator` asks the coordinator there, and needs its address and token alone. Without it, the ledger of `--directory` is read,
whether a coordinator works there or not; where there is none, the coordinator of PACELINE_COORDINATOR is asked.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from paceline.client import Client
from paceline.files.names import LEDGER_NAME
from paceline.records import Records
from services.cli.recorded.opening import opened_ledger
from services.common.insecure import check_coordinator, insecure_option
from services.common.options import caller_token_file_option, directory_option, find_run

if TYPE_CHECKING:
    from protos.paceline.v1.run_pb2 import Run
    from services.coordinator.ledger.ledger import Ledger

VARIABLE = "PACELINE_COORDINATOR"
CommandT = TypeVar("CommandT", bound=Callable[..., Any])

_coordinator_option = click.option(
    "--coordinator",
    metavar="HOST:PORT",
    callback=check_coordinator,
    help=f"Ask the coordinator there instead of reading files; also {VARIABLE}, where --directory has no ledger.",
)


def source_options(command: CommandT) -> CommandT:
    """Add --directory, --coordinator, --token-file and --insecure."""
    return directory_option(caller_token_file_option(insecure_option(_coordinator_option(command))))


@dataclass(frozen=True)
class Source:
    """The records of one ledger, and how they are reached."""

    records: Records
    client: Client | None
    """The coordinator that is asked; None where the ledger is read here."""
    ledger: Ledger | None
    """The ledger that is read here."""

    def runs(self) -> list[Run]:
        """Return all runs, oldest first."""
        if self.client is not None:
            return self.client.runs()
        assert self.ledger is not None
        from services.coordinator.reporting.run_messages import run_message

        return [run_message(self.ledger, row) for row in self.ledger.runs()]

    def run_ids(self) -> list[str]:
        """Return the ids of all runs, oldest first, also where other columns cannot be read. From a ledger, the runs whose rows are
        lost come last."""
        if self.client is not None:
            return [run.run_id for run in self.client.runs()]
        assert self.ledger is not None
        from services.coordinator.ledger.integrity.lost_runs import lost_runs

        lost: list[str] = []
        with suppress(sqlite3.Error):  # tables that cannot be read: `verify` of each run names the damage
            lost = lost_runs(self.ledger.db)
        return [*(row["run_id"] for row in self.ledger.runs()), *lost]

    def run(self, run_id: str) -> Run:
        """Return a run. Raises NotFound."""
        if self.client is not None:
            return self.client.get(run_id)
        assert self.ledger is not None
        from services.coordinator.reporting.run_messages import run_message

        return run_message(self.ledger, self.ledger.run(run_id))

    def spec_text(self, run_id: str) -> str:
        """Return the resolved spec of a run as it is on record. Raises NotFound."""
        if self.client is not None:
            return str(self.client.get(run_id).spec_yaml)
        assert self.ledger is not None
        return str(self.ledger.run(run_id)["spec_yaml"])


@contextmanager
def records_of(directory: Path, coordinator: str | None) -> Iterator[Source]:
    """Give the records of a coordinator, or of the ledger of `directory`. Raises NotFound, Unavailable."""
    address = coordinator or _address_instead(directory / LEDGER_NAME)
    if address:
        with Client(address) as client:
            yield Source(client.records, client, None)
        return
    with ledger_source(directory / LEDGER_NAME) as source:
        yield source


@contextmanager
def records_of_run(run: str, directory: Path, coordinator: str | None) -> Iterator[tuple[Source, str]]:
    """Give the records and the id of a run that is named by its id or by its folder. Raises NotFound, Unavailable."""
    if coordinator:
        path, run_id = directory / LEDGER_NAME, run
    else:
        path, run_id = find_run(run, directory)
    with records_of(path.parent, coordinator) as source:
        yield source, run_id


@contextmanager
def ledger_source(path: Path) -> Iterator[Source]:
    """Give the records of the ledger at `path`. Raises NotFound."""
    from services.coordinator.audit.reading.reader import RecordsReader

    with opened_ledger(path) as ledger:
        reader = RecordsReader(ledger)
        yield Source(Records(lambda method, request: getattr(reader, method)(request)), None, ledger)


def _address_instead(path: Path) -> str:
    """Return the coordinator to ask where there is no ledger at `path`, and nobody named a folder."""
    source = click.get_current_context().get_parameter_source("directory")
    if os.path.lexists(path) or source != click.core.ParameterSource.DEFAULT:
        return ""
    address = os.environ.get(VARIABLE, "")
    return check_coordinator(click.get_current_context(), _OPTION, address) or "" if address else ""


_OPTION = click.Option(["--coordinator"])

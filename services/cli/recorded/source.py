"""The source of the commands on records: a ledger on this machine, or a coordinator anywhere.

`--coordinator` names a coordinator to read. `--directory` names a ledger, which is opened read-only, so a coordinator
may use the ledger meanwhile. Without both options, the coordinator of PACELINE_COORDINATOR is read, and a line says so;
if that variable is not set, the ledger in the folder `runs` is read. `LedgerRuns` reads a ledger as
`paceline.client.Client` reads a coordinator, so each command is written once. A command without --coordinator that
needs the ledger's files says so if PACELINE_COORDINATOR is set. Registered models are found in the same way. While a
coordinator uses the ledger, a command that changes registered models needs --coordinator, because a ledger has one
writer.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import click

from paceline.client import Client, Event
from paceline.errors import Conflict, NotFound, Unavailable
from paceline.files.names import LEDGER_NAME
from paceline.models.registered import REFERENCE, Models, read_reference
from paceline.services.common.access.insecure import check_coordinator, insecure_option
from paceline.services.common.options import caller_token_file_option, directory_option, find_run

if TYPE_CHECKING:
    from paceline.services.coordinator.ledger.ledger import Ledger
    from paceline.v1.registry_pb2 import RegisteredModel
    from paceline.v1.run_pb2 import Run


VARIABLE = "PACELINE_COORDINATOR"
EVENTS_AT_ONCE = 1000
DEFAULT_DIRECTORY = Path("runs")
CommandT = TypeVar("CommandT", bound=Callable[..., Any])

_coordinator_option = click.option(
    "--coordinator",
    metavar="HOST:PORT",
    callback=check_coordinator,
    help=f"Read from the coordinator at this address instead of from files. Default: {VARIABLE}, if --directory is not given.",
)


def source_options(command: CommandT) -> CommandT:
    return directory_option(caller_token_file_option(insecure_option(_coordinator_option(command))))


def find_files(run: str, directory: Path) -> tuple[Path, str]:
    """Return the result of `find_run` for a command that works with files alone; say so if --directory was not
    given."""
    path, run_id = find_run(run, directory)
    if path == directory / LEDGER_NAME:
        say_files(directory)
    return path, run_id


def say_files(directory: Path) -> None:
    """Say that the command works with files, if PACELINE_COORDINATOR is set and nobody named a folder."""
    context, address = click.get_current_context(silent=True), os.environ.get(VARIABLE, "")
    if address and context and context.get_parameter_source("directory") == click.core.ParameterSource.DEFAULT:
        click.echo(
            f"the command works with the files in {directory}, not with the coordinator at {address} ({VARIABLE}); "
            "--directory names another folder",
            err=True,
        )


def _said(_context: click.Context, _parameter: click.Parameter, directory: Path) -> Path:
    say_files(directory)
    return directory


files_option = click.option(
    "--directory",
    type=click.Path(path_type=Path),
    default=DEFAULT_DIRECTORY,
    show_default=True,
    callback=_said,
    help=f"Folder of the coordinator's ledger and runs, on this host; it is used even if {VARIABLE} is set.",
)


class LedgerRuns:
    """The runs of one ledger that is open in this thread, and their records."""

    def __init__(self, ledger: Ledger):
        from paceline.services.coordinator.records.reader import records_in

        self.ledger, self.records = ledger, records_in(ledger)

    def runs(self) -> list[Run]:
        """Return all runs, oldest first."""
        return [self.get(row["run_id"]) for row in self.ledger.runs()]

    def get(self, run_id: str) -> Run:
        from paceline.services.coordinator.records.lists import run_message

        row = self.ledger.run(run_id)
        message = run_message(self.ledger, row)
        message.spec_yaml = row["spec_yaml"]
        return message

    def watch(self, run_id: str, after: int = 0) -> Iterator[Event]:
        """Yield the recorded events of a run after a sequence number, oldest first. Raises NotFound."""
        self.ledger.run(run_id)
        while rows := self.ledger.events(run_id, after, EVENTS_AT_ONCE):
            for row in rows:
                after = row["sequence"]
                yield Event(after, row["kind"], json.loads(row["json"]))

    @property
    def models(self) -> Models:
        return _local(self.ledger)

    def run_ids(self) -> list[str]:
        """Return all run ids, oldest first, also those of runs with unreadable columns; runs with lost rows come last."""
        from paceline.services.coordinator.ledger.file_check import lost_runs

        lost: list[str] = []
        with contextlib.suppress(sqlite3.Error):  # tables that cannot be read: `verify` of each run names the damage
            lost = lost_runs(self.ledger.db)
        return [*(row["run_id"] for row in self.ledger.runs()), *lost]


Source: TypeAlias = Client | LedgerRuns
"""The source of the commands: a coordinator, or a ledger on this machine."""


def run_ids(source: Source) -> list[str]:
    return source.run_ids() if isinstance(source, LedgerRuns) else [run.run_id for run in source.runs()]


@contextlib.contextmanager
def opened_ledger(path: Path) -> Iterator[Ledger]:
    """Open the ledger at `path`, read-only; explain the damage of an unreadable file. Raises NotFound, LedgerFault."""
    from paceline.services.coordinator.ledger.file_check import explained
    from paceline.services.coordinator.ledger.ledger import Ledger

    try:
        ledger = Ledger(path, read_only=True)
    except NotFound:
        raise NotFound(f"no ledger at {path}; name the coordinator's --directory, or the run's folder") from None
    with contextlib.closing(ledger), explained(ledger.db, ledger.path):
        yield ledger


@contextlib.contextmanager
def ledger_source(path: Path) -> Iterator[LedgerRuns]:
    """Open the records of the ledger at `path`. Raises NotFound."""
    with opened_ledger(path) as ledger:
        yield LedgerRuns(ledger)


@contextlib.contextmanager
def records_of(directory: Path, coordinator: str | None) -> Iterator[Source]:
    """Open the records of a coordinator, or of the ledger of `directory`. Raises NotFound, Unavailable."""
    address = coordinator or address_instead()
    with Client(address) if address else ledger_source(directory / LEDGER_NAME) as source:
        yield source


@contextlib.contextmanager
def records_of_run(run: str, directory: Path, coordinator: str | None) -> Iterator[tuple[Source, str]]:
    """Open the records of a run by its id or folder; yield records and id. Raises NotFound, Unavailable."""
    path, run_id = (directory / LEDGER_NAME, run) if coordinator else find_run(run, directory)
    with ledger_source(path) if path != directory / LEDGER_NAME else records_of(directory, coordinator) as source:
        yield source, run_id


@contextlib.contextmanager
def runs_of(coordinator: str, directory: Path | None) -> Iterator[Source]:
    """Open the runs of `directory`; without a directory, the coordinator's. If nobody named a coordinator and none
    answers, open the ledger of the default directory, if that directory has one, and print a line. Raises Unavailable,
    NotFound."""
    if directory is None:
        with Client(coordinator) as client:
            if not _may_read_directory() or _answers(client):
                yield client
                return
        click.echo(
            f"no coordinator answers at {coordinator}; the command reads the records in {DEFAULT_DIRECTORY}", err=True
        )
    with ledger_source((directory or DEFAULT_DIRECTORY) / LEDGER_NAME) as source:
        yield source


def _may_read_directory() -> bool:
    source = click.get_current_context().get_parameter_source("coordinator")
    return source == click.core.ParameterSource.DEFAULT and (DEFAULT_DIRECTORY / LEDGER_NAME).is_file()


def _answers(client: Client) -> bool:
    try:
        client.members()
    except Unavailable:
        return False
    return True


def address_instead() -> str:
    """Return the address of the coordinator that the environment names, and print a line about it. If a folder was
    named, or if the environment names no coordinator, return an empty text: then the ledger is read."""
    context = click.get_current_context()
    address = os.environ.get(VARIABLE, "")
    if not address or context.get_parameter_source("directory") != click.core.ParameterSource.DEFAULT:
        return ""
    click.echo(
        f"the command reads from the coordinator at {address} ({VARIABLE}); --directory reads a folder", err=True
    )
    return check_coordinator(context, _OPTION, address) or ""


_OPTION = click.Option(["--coordinator"])


@contextlib.contextmanager
def models_of(directory: Path, coordinator: str | None) -> Iterator[Models]:
    """Open the registered models of a coordinator or of a ledger, read-only. Raises NotFound, Unavailable."""
    with records_of(directory, coordinator) as source:
        yield source.models


@contextlib.contextmanager
def changing_models_of(directory: Path, coordinator: str | None) -> Iterator[Models]:
    """Open the registered models for changes. Raises NotFound, Unavailable; Conflict if a coordinator uses the ledger."""
    with records_of(directory, coordinator) as source:
        if isinstance(source, Client):
            yield source.models
            return
    from paceline.services.coordinator.ledger.ledger import Ledger

    path = directory / LEDGER_NAME
    if not path.is_file():
        raise NotFound(f"no ledger at {path}; name the coordinator's --directory")
    try:
        ledger = Ledger(path)
    except Conflict as error:
        raise Conflict(f"{error}. With --coordinator HOST:PORT, name the coordinator that uses the ledger") from None
    with contextlib.closing(ledger):
        yield _local(ledger)


def registered_model(model: str, directory: Path) -> RegisteredModel | None:
    """Return the registered model that NAME:VERSION or NAME@ALIAS names; None for a text that is neither. Raises NotFound."""
    if model.startswith("run:") or not REFERENCE.fullmatch(model) or not {*":@"}.intersection(model):
        return None
    with models_of(directory, None) as models:
        found: RegisteredModel = models.show(read_reference(model)).model
    return found


def _local(ledger: Ledger) -> Models:
    from paceline.services.coordinator.model_servicer import RegistryCalls

    calls = RegistryCalls(ledger, ledger, getpass.getuser)

    def call(method: str, request: Any) -> Any:
        return getattr(calls, method)(request)

    return Models(call)

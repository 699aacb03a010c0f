"""Where the commands on registered models find them: the ledger of --directory, or a coordinator.

Commands that change something open the ledger as its one writer, which is refused while a coordinator has it; then --coordinator
names that one.
"""

from __future__ import annotations

import contextlib
import getpass
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.client import Client
from paceline.errors import Conflict, NotFound
from paceline.files.names import LEDGER_NAME
from paceline.models.registered import REFERENCE, Models, read_reference
from paceline.services.cli.recorded.source import records_of

if TYPE_CHECKING:
    from paceline.services.coordinator.ledger.ledger import Ledger
    from paceline.v1.registry_pb2 import RegisteredModel


@contextlib.contextmanager
def models_of(directory: Path, coordinator: str | None) -> Iterator[Models]:
    """Give the registered models of a coordinator, or of the ledger of `directory`, to read. Raises NotFound, Unavailable."""
    with records_of(directory, coordinator) as source:
        yield source.models if isinstance(source, Client) else _local(source.ledger)


@contextlib.contextmanager
def changing_models_of(directory: Path, coordinator: str | None) -> Iterator[Models]:
    """Give the registered models to change them. Raises NotFound, Unavailable; Conflict while a coordinator has the ledger."""
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
        raise Conflict(
            f"{error}. Name the coordinator that works there with --coordinator HOST:PORT"
        ) from None
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

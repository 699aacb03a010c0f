"""Opening a ledger for the commands that read records on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import NotFound

if TYPE_CHECKING:
    from services.coordinator.ledger.ledger import Ledger


@contextlib.contextmanager
def opened_ledger(path: Path) -> Iterator[Ledger]:
    """Open the ledger at `path`, read-only; explain the damage of a file that cannot be read. Raises NotFound,
    LedgerFault."""
    from services.coordinator.ledger.integrity.file_damage import explained

    with contextlib.closing(open_ledger(path)) as opened, explained(opened.db, opened.path):
        yield opened


def open_ledger(path: Path) -> Ledger:
    """Open the ledger at `path`, read-only. Raises NotFound."""
    from services.coordinator.ledger.ledger import Ledger

    try:
        return Ledger(path, read_only=True)
    except NotFound:
        raise NotFound(
            f"no ledger at {path}; name the coordinator's --directory, or the run's folder"
        ) from None

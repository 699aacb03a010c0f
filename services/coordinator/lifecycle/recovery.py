"""Recovery of the ledger's runs after a restart, before anyone may connect.

Nothing here keeps a run from going on: a summary that a kill prevented is written if its rows can be read.
"""

from __future__ import annotations

import logging
import sqlite3

from paceline.rate_limited_log import unforeseen
from paceline.services.coordinator.ledger.ledger import ACTIVE_STATES
from paceline.services.coordinator.lifecycle.context import RunContext

log = logging.getLogger(__name__)


async def recover(context: RunContext) -> None:
    """Write missing summaries, and read from the ledger whether the active run is retried automatically."""
    for row in context.ledger.runs():
        if row["state"] not in ("queued", *ACTIVE_STATES):
            _summarize(context, row["run_id"])
    active = context.ledger.active_run()
    if active is not None and active["state"] == "paused" and context.ledger.is_retried(active["run_id"]):
        context.delays.retried = active["run_id"]


async def warn_of_backup(context: RunContext) -> None:
    """Warn the active run if the ledger is a backup that was put back."""
    if context.ledger.set_aside is not None:
        message = (
            f"the ledger is a backup that was put back; the newer files beside it were moved to "
            f"{context.ledger.set_aside}. Files that the run has written since the backup stay, and nothing loads them"
        )
        log.warning("%s", message)
        await context.watchers.warn([message])


def _summarize(context: RunContext, run_id: str) -> None:
    """Write the summary of an ended run, if a kill prevented it."""
    try:
        context.run_log.summarize_if_missing(run_id)
    except sqlite3.Error:
        raise
    except (
        Exception
    ) as error:  # a damaged row of this run may raise anything; it keeps no other run from going on
        unforeseen.note(f"the summary of run {run_id}", error)

"""Messages about runs for the control plane, from the ledger's rows alone: no YAML is parsed. A row that cannot be read
becomes a message that says so, and does not hide the other runs."""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Sequence

from paceline.errors import InvalidInput
from paceline.rate_limited_log import RateLimitedLog
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.v1 import run_pb2

PAGE_SIZE = 100
seldom = RateLimitedLog(logging.getLogger(__name__))


def run_message(ledger: Ledger, row: sqlite3.Row, queue: Sequence[str] | None = None) -> run_pb2.Run:
    """Return the message of a run's row, with its token accounting; `queue` has the ids of the runs that wait, in their order."""
    run_id = row["run_id"]
    if queue is None:
        queue = [waiting["run_id"] for waiting in ledger.queue()]
    return run_pb2.Run(
        run_id=run_id,
        state=run_pb2.RunState.Value(f"RUN_STATE_{row['state'].upper()}"),
        message=row["message"],
        step=row["next_step"],
        max_num_steps=row["max_num_steps"],
        directory=str(ledger.run_directory(run_id)),
        groups=ledger.groups_by_state(run_id),
        tokens=ledger.token_books(run_id),
        age_s=max(0.0, time.time() - row["submitted_s"]),
        warnings=json.loads(row["warnings_json"]),
        priority=ledger.priority(run_id),
        queue_place=queue.index(run_id) + 1 if run_id in queue else 0,
    )


def page(ledger: Ledger, request: run_pb2.ListRequest) -> run_pb2.ListResponse:
    """Return a page of runs, oldest first. Raises InvalidInput for an invalid page token."""
    if not request.page_token.isascii() or not (request.page_token or "0").isdigit():
        raise InvalidInput(
            f"page_token {request.page_token[:40]!r} is none; send `next_page_token` of the answer before"
        )
    after = min(int((request.page_token or "0")[:19]), 1 << 62)
    size = min(request.page_size or PAGE_SIZE, PAGE_SIZE)
    rows = ledger.runs_after(after, size + 1)
    queue = [waiting["run_id"] for waiting in ledger.queue()]
    response = run_pb2.ListResponse(runs=[_tolerant(ledger, row, queue) for row in rows[:size]])
    if len(rows) > size:
        response.next_page_token = str(rows[size - 1]["sequence"])
    return response


def _tolerant(ledger: Ledger, row: sqlite3.Row, queue: Sequence[str]) -> run_pb2.Run:
    try:
        return run_message(ledger, row, queue)
    except Exception as error:  # a damaged row may raise anything, and concerns this run alone
        run_id = str(row["run_id"])
        seldom.warning(run_id, "the record of run %s cannot be read", run_id, error=error)
        return run_pb2.Run(
            run_id=run_id,
            message=f"its record cannot be read ({type(error).__name__}); see `paceline ledger verify`",
        )

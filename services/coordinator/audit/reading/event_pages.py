"""RecordsService.ListEvents: pages of a run's events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import InvalidInput
from paceline.services.coordinator.audit.reading import page_tokens
from paceline.v1 import records_pb2 as pb

if TYPE_CHECKING:
    from paceline.services.coordinator.ledger.ledger import Ledger

PAGE_SIZE = 1000
MAX_BYTES = 8 << 20
"""Size of the JSON in an answer; the event that exceeds it is the last one."""

READ_AT_ONCE = 20_000
"""Events that a call reads, those of other kinds included."""
MAX_KINDS = 16


def list_events(ledger: Ledger, request: pb.ListEventsRequest) -> pb.ListEventsResponse:
    """Return a page of events. Raises NotFound, InvalidInput."""
    ledger.run(request.run_id)
    if len(request.kinds) > MAX_KINDS:
        raise InvalidInput(f"kinds has {len(request.kinds)} entries, there are fewer kinds")
    size = page_tokens.page_size(request.page_size, PAGE_SIZE)
    newest = ledger.last_sequence(request.run_id)
    if request.newest:
        first, until, order = max(0, newest - READ_AT_ONCE), newest, "DESC"
    else:
        first, until, order = request.after, min(request.after + READ_AT_ONCE, newest), "ASC"
    of_kinds = f" AND kind IN ({', '.join('?' * len(request.kinds))})" if request.kinds else ""
    rows = ledger.db.execute(
        "SELECT sequence, kind, json FROM events WHERE run_id = ? AND sequence > ? AND sequence <= ?"
        f"{of_kinds} ORDER BY sequence {order} LIMIT ?",
        (request.run_id, min(first, page_tokens.LARGEST), until, *request.kinds, size),
    )
    response, size_bytes, is_whole = pb.ListEventsResponse(), 0, True
    found = []
    for row in rows:
        text = row["json"]
        found.append((row["sequence"], row["kind"], text))
        size_bytes += len(text)
        if size_bytes > MAX_BYTES:
            is_whole = False
            break
    for sequence, kind, text in sorted(found):
        response.events.add(sequence=sequence, kind=kind, json=text)
    _add_steps(ledger, request.run_id, response)
    is_full = not is_whole or len(found) == size
    response.next_after = found[-1][0] if is_full and not request.newest else until
    response.more = not request.newest and response.next_after < newest
    return response


def _add_steps(ledger: Ledger, run_id: str, response: pb.ListEventsResponse) -> None:
    """Say of each event at which step it happened."""
    step = 0
    if response.events:
        row = ledger.db.execute(
            "SELECT json_extract(json, '$.step') FROM events WHERE run_id = ? AND sequence < ? AND kind = 'step'"
            " ORDER BY sequence DESC LIMIT 1",
            (run_id, response.events[0].sequence),
        ).fetchone()
        step = int(row[0]) + 1 if row is not None and row[0] is not None else 0
        rows = ledger.db.execute(
            "SELECT sequence, json_extract(json, '$.step') FROM events WHERE run_id = ? AND sequence BETWEEN ? AND ?"
            " AND kind = 'step' ORDER BY sequence",
            (run_id, response.events[0].sequence, response.events[-1].sequence),
        ).fetchall()
        steps = iter([(row[0], int(row[1] or 0)) for row in rows])
        upcoming = next(steps, None)
        for event in response.events:
            while upcoming is not None and upcoming[0] < event.sequence:
                step, upcoming = upcoming[1] + 1, next(steps, None)
            event.at_step = step

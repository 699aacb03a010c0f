"""Answers RecordsService.GetMetrics (metrics of a run by step, averaged down to a number of points), and requests for
pages of a run's events. SQLite reads and averages the events' JSON, so the interpreter is free for the exchange
meanwhile. A call reads a bounded number of events; its page ends at the end of a point, so the points do not depend
on the pages."""

from __future__ import annotations

import math
import sqlite3
from fnmatch import fnmatchcase

from google.protobuf.message import DecodeError

from paceline.errors import InvalidInput
from paceline.host.regular_file import open_regular
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.records import page_tokens
from paceline.services.coordinator.reporting.member_files import MAX_REPORT_BYTES, path_of
from paceline.v1 import records_pb2 as pb
from paceline.v1 import worker_pb2

KINDS = ("step", "evaluation")
POINTS, MAX_POINTS = 500, 5000
MAX_PATTERNS, MAX_SERIES = 64, 128
EVENTS_AT_ONCE = 5000
"""Number of events that a call reads first."""

SAMPLED = 32
"""Number of events, at a run's start and at its end, from which the names of the run's metrics are collected."""

NO_METRICS = ("step", "time")
NAN = math.nan


def get_metrics(ledger: Ledger, request: pb.GetMetricsRequest, at_once: int = EVENTS_AT_ONCE) -> pb.GetMetricsResponse:
    """Return a page of a run's metrics as points. Raises NotFound, InvalidInput."""
    run, kind = ledger.run(request.run_id), request.kind or KINDS[0]
    if kind not in KINDS:
        raise InvalidInput(f"kind is {kind[:40]!r}, but must be one of {', '.join(KINDS)}")
    if len(request.names) > MAX_PATTERNS:
        raise InvalidInput(f"names has {len(request.names)} entries, but a request may have at most {MAX_PATTERNS}")
    names = _names(ledger, request.run_id, kind)
    if not request.names:
        return pb.GetMetricsResponse(names=names)
    selected = [name for name in names if any(fnmatchcase(name, pattern) for pattern in request.names)]
    if len(selected) > MAX_SERIES:
        raise InvalidInput(f"names match {len(selected)} metrics, but at most {MAX_SERIES} are allowed in one request")
    last_step = request.to_step or run["next_step"]
    points = page_tokens.page_size(request.max_points or POINTS, MAX_POINTS)
    width = max(1, math.ceil((last_step - request.from_step + 1) / points))
    return _points(ledger, request, kind, selected, (width, last_step), at_once)


def _names(ledger: Ledger, run_id: str, kind: str) -> list[str]:
    found: set[str] = set()
    for order in ("ASC", "DESC"):
        rows = ledger.db.execute(
            "SELECT DISTINCT cell.key FROM (SELECT json FROM events WHERE run_id = ? AND kind = ?"
            f" ORDER BY sequence {order} LIMIT {SAMPLED}) AS part, json_each(part.json) AS cell"
            " WHERE cell.type IN ('integer', 'real')",
            (run_id, kind),
        )
        found.update(row[0] for row in rows)
    return sorted(name for name in found - set(NO_METRICS) if '"' not in name)


def _points(
    ledger: Ledger, request: pb.GetMetricsRequest, kind: str, names: list[str], scale: tuple[int, int], window: int
) -> pb.GetMetricsResponse:
    # Step s has a sequence number above s, so the events of earlier steps need not be read.
    (after,) = page_tokens.read(request.page_token, 1) or (request.from_step if kind == "step" else 0,)
    after, newest = min(after, page_tokens.LARGEST), ledger.last_sequence(request.run_id)
    while True:
        until = min(after + window, newest)
        rows = _rows(ledger, request, kind, names, scale, (after, until))
        if len(rows) != 1 or until == newest:
            break
        window *= 2  # the only point may continue after the window
    width, _ = scale
    response = pb.GetMetricsResponse(steps_per_point=width)
    if until < newest:
        cut = rows.pop() if rows else None  # the last point may continue too
        response.next_page_token = page_tokens.write(until if cut is None else cut[2] - 1)
    response.steps.extend(row[1] for row in rows)
    response.times.extend(NAN if row[3] is None else row[3] for row in rows)
    for index, name in enumerate(names):
        columns = [[_number(row[4 + 3 * index + part]) for row in rows] for part in range(3)]
        if any(not math.isnan(value) for value in columns[0]):
            series = response.series.add(name=name, values=columns[0])
            if width > 1:
                series.least.extend(columns[1])
                series.greatest.extend(columns[2])
    return response


def _rows(
    ledger: Ledger,
    request: pb.GetMetricsRequest,
    kind: str,
    names: list[str],
    scale: tuple[int, int],
    window: tuple[int, int],
) -> list[sqlite3.Row]:
    """Return a row for each point of a window of events: its number, first step, first event, time, and mean, least and
    greatest value of each metric."""
    first, (width, last) = min(request.from_step, page_tokens.LARGEST), scale
    values = "".join(f", json_extract(json, ?{index + 8}) AS v{index}" for index in range(len(names)))
    sums = "".join(f", AVG(v{index}), MIN(v{index}), MAX(v{index})" for index in range(len(names)))
    return ledger.rows(
        "WITH part AS MATERIALIZED (SELECT sequence, json_extract(json, '$.step') AS step,"
        f" json_extract(json, '$.time') AS time{values} FROM events"
        " WHERE run_id = ?1 AND sequence > ?2 AND sequence <= ?3 AND kind = ?4)"
        f" SELECT (step - ?6) / ?5 AS point, MIN(step), MIN(sequence), MIN(time){sums} FROM part"
        " WHERE step BETWEEN ?6 AND ?7 GROUP BY point ORDER BY point",
        (request.run_id, *window, kind, width, first, min(last, page_tokens.LARGEST), *(f'$."{n}"' for n in names)),
    )


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else NAN


def get_token_statistics(ledger: Ledger, request: pb.GetTokenStatisticsRequest) -> pb.GetTokenStatisticsResponse:
    """Return the token statistics of a step; empty if missing or damaged. Raises NotFound for an unknown run."""
    ledger.run(request.run_id)
    response = pb.GetTokenStatisticsResponse()
    report = worker_pb2.TokenStatistics()
    try:
        path = path_of(ledger.path.parent, request.run_id, min(request.step, page_tokens.LARGEST))
        with open_regular(path) as file:
            report.ParseFromString(file.read(MAX_REPORT_BYTES + 1))
    except (OSError, DecodeError):
        return response
    for each in sorted(report.completions, key=lambda completion: (completion.group_id, completion.index)):
        if not request.HasField("group_id") or each.group_id == request.group_id:
            response.completions.add(
                group_id=each.group_id, index=each.index, logprobs=each.logprobs, entropies=each.entropies
            )
    return response


PAGE_SIZE = 1000
MAX_BYTES = 8 << 20
"""Number of bytes of JSON after which an answer ends; the event that exceeds them is the last one."""

READ_AT_ONCE = 20_000
"""Largest number of events that a call reads, including those of other kinds than requested."""
MAX_KINDS = 16


def list_events(ledger: Ledger, request: pb.ListEventsRequest, at_once: int = READ_AT_ONCE) -> pb.ListEventsResponse:
    """Return a page of events. Raises NotFound, InvalidInput."""
    ledger.run(request.run_id)
    if len(request.kinds) > MAX_KINDS:
        raise InvalidInput(f"kinds has {len(request.kinds)} entries, but there are fewer kinds")
    size = page_tokens.page_size(request.page_size, PAGE_SIZE)
    newest = ledger.last_sequence(request.run_id)
    if request.newest:
        first, until, order = max(0, newest - at_once), newest, "DESC"
    else:
        first, until, order = request.after, min(request.after + at_once, newest), "ASC"
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
    step = 0
    if response.events:
        row = ledger.row(
            "SELECT json_extract(json, '$.step') FROM events WHERE run_id = ? AND sequence < ? AND kind = 'step'"
            " ORDER BY sequence DESC LIMIT 1",
            (run_id, response.events[0].sequence),
        )
        step = int(row[0]) + 1 if row is not None and row[0] is not None else 0
        rows = ledger.rows(
            "SELECT sequence, json_extract(json, '$.step') FROM events WHERE run_id = ? AND sequence BETWEEN ? AND ?"
            " AND kind = 'step' ORDER BY sequence",
            (run_id, response.events[0].sequence, response.events[-1].sequence),
        )
        steps = iter([(row[0], int(row[1] or 0)) for row in rows])
        upcoming = next(steps, None)
        for event in response.events:
            while upcoming is not None and upcoming[0] < event.sequence:
                step, upcoming = upcoming[1] + 1, next(steps, None)
            event.at_step = step

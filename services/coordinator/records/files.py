"""Answers requests from the files beside the ledger: the members' readings, averaged into a limited number of points,
and the services' logs. Writers limit the files' size, which limits the work of a call. A request gives a log's name
from the list and never a path, so it cannot read other files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from paceline.errors import InvalidInput, NotFound
from paceline.host.regular_file import open_regular
from paceline.services.coordinator.reporting.member_files import FOLDER, PERIOD_S, files_of
from paceline.v1 import records_pb2 as pb

MAX_POINTS, USUAL_POINTS = 2000, 300
MAX_MEMBERS = 64
NAN = float("nan")
Key = tuple[str, str, str]
"""Key of a series: pool, member id (empty for the pool itself), gauge."""


def get_gauge_history(directory: Path, request: pb.GetGaugeHistoryRequest) -> pb.GetGaugeHistoryResponse:
    """Return points of pools, or of the members that the request names. Raises InvalidInput."""
    if len(request.member_ids) > MAX_MEMBERS:
        raise InvalidInput(f"member_ids has {len(request.member_ids)} entries, but at most {MAX_MEMBERS} are allowed")
    if not (math.isfinite(request.from_time) and math.isfinite(request.to_time)):
        raise InvalidInput("from_time and to_time must be finite numbers of seconds since 1970")
    readings = list(_readings(directory / FOLDER, request.from_time, request.to_time or math.inf))
    if not readings:
        return pb.GetGaugeHistoryResponse(seconds_per_point=PERIOD_S)
    first_s = readings[0][0]
    points = min(request.max_points or USUAL_POINTS, MAX_POINTS)
    width_s = max(PERIOD_S, (readings[-1][0] - first_s + PERIOD_S) / points)
    member_ids, sums = set(request.member_ids), dict[Key, dict[int, tuple[float, int]]]()
    for time_s, members in readings:
        point = min(int((time_s - first_s) / width_s), points - 1)
        for key, value in _values(members, member_ids):
            column = sums.setdefault(key, {})
            total, number = column.get(point, (0.0, 0))
            column[point] = (total + value, number + 1)
    filled = sorted({point for column in sums.values() for point in column})
    response = pb.GetGaugeHistoryResponse(
        times=[first_s + point * width_s for point in filled], seconds_per_point=width_s
    )
    for (pool, member_id, name), column in sorted(sums.items()):
        means = [column[point][0] / column[point][1] if point in column else NAN for point in filled]
        response.series.add(pool=pool, member_id=member_id, name=name, values=means)
    return response


def _readings(folder: Path, from_s: float, to_s: float) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield time and members of the readings in a range, oldest first, without lines that a kill cut off."""
    files = files_of(folder)
    for path, later in zip_longest(files, files[1:]):
        if later is not None and _begin_s(later) < from_s:
            continue
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:  # removed meanwhile, because it was the oldest file
            continue
        for line in lines:
            try:
                content = json.loads(line)
                time_s, members = float(content["time"]), content["members"]
                if from_s <= time_s <= to_s and isinstance(members, dict):
                    yield time_s, members
            except (ValueError, KeyError, TypeError):
                continue


def _begin_s(path: Path) -> float:
    digits = path.stem.rpartition("-")[2]
    return int(digits) / 1e9 if digits.isdecimal() else 0.0


def _values(members: dict[str, Any], member_ids: set[str]) -> Iterator[tuple[Key, float]]:
    for member_id, gauges in members.items():
        if not isinstance(gauges, dict) or (member_ids and member_id not in member_ids):
            continue
        pool = str(gauges.get("pool", ""))
        for name, value in gauges.items():
            if isinstance(value, int | float):
                yield (pool, member_id if member_ids else "", name), float(value)


LOGS = "logs"
SUFFIX = ".log"
MAX_BYTES = 64 << 10
MAX_NAMES = 1000


def read_log(directory: Path, request: pb.ReadLogRequest) -> pb.ReadLogResponse:
    """Return the names of the logs, and the end of the requested log. Raises NotFound."""
    names = _names(directory / LOGS)
    response = pb.ReadLogResponse(names=names)
    if not request.name:
        return response
    if request.name not in names:
        raise NotFound(
            f"there is no log {request.name[:80]!r}; the logs are: {', '.join(names[:40]) or 'none'}. Only `paceline up` and "
            "the demo keep logs beside the ledger"
        )
    max_bytes = min(request.max_bytes or MAX_BYTES, MAX_BYTES)
    try:
        # A link could lead out of the folder.
        with open_regular(directory / LOGS / f"{request.name}{SUFFIX}", follows_link=False) as file:
            response.size = file.seek(0, os.SEEK_END)
            start = file.seek(max(0, response.size - max_bytes))
            content = file.read(max_bytes)
    except OSError as error:
        raise NotFound(f"the log {request.name} cannot be read: {error.strerror or error}") from None
    if start:
        content = content.partition(b"\n")[2] or content
    response.text = content.decode("utf-8", "replace")
    return response


def _names(folder: Path) -> list[str]:
    try:
        found = sorted(path.name.removesuffix(SUFFIX) for path in folder.iterdir() if path.suffix == SUFFIX)
    except OSError:
        return []
    return found[:MAX_NAMES]

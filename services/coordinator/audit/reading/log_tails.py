"""RecordsService.ReadLog: the services' logs beside the ledger, which `paceline up` keeps there.

A request names a log as the list does, never a path, so no other file can be read.
"""

from __future__ import annotations

import os
from pathlib import Path

from paceline.errors import NotFound
from paceline.v1 import records_pb2 as pb

LOGS = "logs"
SUFFIX = ".log"
MAX_BYTES = 64 << 10
MAX_NAMES = 1000


def read_log(directory: Path, request: pb.ReadLogRequest) -> pb.ReadLogResponse:
    """Return the names of the logs, and the end of the one that the request names. Raises NotFound."""
    names = _names(directory / LOGS)
    response = pb.ReadLogResponse(names=names)
    if not request.name:
        return response
    if request.name not in names:
        raise NotFound(
            f"there is no log {request.name[:80]!r}; the logs are: {', '.join(names[:40]) or 'none'}. Only `paceline up` and "
            "the demo keep logs beside the ledger"
        )
    wanted = min(request.max_bytes or MAX_BYTES, MAX_BYTES)
    try:
        # A link could lead out of the folder.
        fd = os.open(directory / LOGS / f"{request.name}{SUFFIX}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise NotFound(f"the log {request.name} cannot be read: {error.strerror}") from None
    with open(fd, "rb") as file:
        response.size = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, response.size - wanted))
        content = file.read(wanted)
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

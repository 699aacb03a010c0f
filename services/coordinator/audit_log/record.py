"""One record of the audit log, and the chain: the hash of a record is over its line, which names the hash before.

A line is JSON with the fields in the order of `Entry`, and ends with `"hash"`: the SHA-256 of the line without that field. So a
changed, removed, added or moved record breaks the chain at its place. Pure functions.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

MAX_TEXT = 512
"""Characters of each text of a record."""
MAX_LINE_BYTES = 64 << 10
"""Bytes of a line: eight texts, each character escaped to 12 bytes at most, and the rest."""
OK = "OK"
"""Result of a call that was carried out."""
_HASH = b',"hash":"'
_HASH_BYTES = len(_HASH) + 64 + len(b'"}')


@dataclass(frozen=True)
class Entry:
    """What is recorded: never a token, a secret or a prompt, only digests of requests."""

    what: str
    """`package.Service/Method`, or `exchange/KIND`, or an event of the log itself, as `audit/start`."""
    result: str = OK
    """Name of a gRPC status."""
    who: str = ""
    """Name of the caller, by its token; empty where there is no valid one."""
    roles: tuple[str, ...] = ()
    certificate: str = ""
    """Name in the client certificate; empty without one."""
    address: str = ""
    """Address of the peer, host:port; empty where it cannot be seen."""
    subject: str = ""
    """Member, run or registered model that the request names."""
    why: str = ""
    """Reason of a refusal."""
    request_sha256: str = ""
    """SHA-256 of the request's bytes; empty for one that was not read."""
    count: int = 1
    """Refusals that the record stands for."""


@dataclass(frozen=True)
class Record:
    """A line of the log."""

    sequence: int
    time: str
    """Wall clock, UTC, as ISO 8601."""
    previous: str
    """Hash of the record before; empty for the first."""
    hash: str
    fields: dict[str, Any]
    """All fields of the line."""


def chained(sequence: int, time_s: float, entry: Entry, previous: str) -> tuple[bytes, str]:
    """Return the line of a record, with its end of line, and its hash. `time_s` is in seconds since 1970."""
    texts = {
        name: value[:MAX_TEXT] if isinstance(value, str) else value
        for name, value in vars(entry).items()
        if value not in ("", (), 1)
    }
    when = datetime.fromtimestamp(time_s, UTC).isoformat(timespec="microseconds")
    body = _json({"sequence": sequence, "time": when, **texts, "previous": previous})
    digest = hashlib.sha256(body).hexdigest()
    return body[:-1] + _HASH + digest.encode() + b'"}\n', digest


def read_line(line: bytes) -> Record:
    """Return the record of a line without its end. Raises ValueError for one that does not have its own hash."""
    body, end = line[:-_HASH_BYTES] + b"}", line[-_HASH_BYTES:]
    if not (end.startswith(_HASH) and end.endswith(b'"}')):
        raise ValueError("it is no record")
    given = end[len(_HASH) : -2].decode("ascii", "replace")
    if hashlib.sha256(body).hexdigest() != given:
        raise ValueError("its hash is not that of its content")
    fields = json.loads(line)
    sequence, time, previous = fields.get("sequence"), fields.get("time"), fields.get("previous")
    if not (isinstance(sequence, int) and isinstance(time, str) and isinstance(previous, str)):
        raise ValueError("it lacks its sequence, time or previous hash")
    return Record(sequence, time, previous, given, fields)


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()

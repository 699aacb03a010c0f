"""Writes and reads the audit log's records, in files `NUMBER.jsonl` in the folder `audit` of the coordinator's
directory.

A line is JSON with the fields in the order of `Entry`. It ends with `"hash"`, the SHA-256 of the line without that
field, and it also has the hash of the previous record. So a changed, removed, added or moved record breaks the chain at
its position.

Promises: the operating system has a record when `append` returns, so the death of the process loses none; the caller
syncs it to the disk. Files are only appended to. After MAX_FILE_BYTES a new file begins, whose first record continues
the chain. If there are more than MAX_FILES files, the oldest is deleted, and the table `audit_heads` keeps its last
hash. An incomplete line after a power cut is cut off when the log is opened. A folder or a link to a device is never
read, even if it has the name of a file of the log: the log continues in the next file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from paceline.errors import LedgerFault
from paceline.files.whole_file import sync_folder
from paceline.host.regular_file import open_regular
from paceline.services.coordinator.ledger.tables.audit_heads import NONE, AuditHead

MAX_TEXT = 512
"""Largest number of characters of each text of a record."""
MAX_LINE_BYTES = 64 << 10
"""Largest number of bytes of a line: eight texts, each character escaped to 12 bytes at most, and the rest."""
OK = "OK"
_HASH = b',"hash":"'
_HASH_BYTES = len(_HASH) + 64 + len(b'"}')


@dataclass(frozen=True)
class Entry:
    """Content of a record. It never has a token, a secret or a prompt; of a request it has only the digest."""

    what: str
    """`package.Service/Method`, or `exchange/KIND`, or an event of the log itself, such as `audit/start`."""
    result: str = OK
    """Name of a gRPC status."""
    who: str = ""
    """Name of the caller, from its token; empty without a valid token."""
    roles: tuple[str, ...] = ()
    certificate: str = ""
    """Name in the client certificate; empty without a certificate."""
    address: str = ""
    """Address of the peer, host:port; empty if it is unknown."""
    subject: str = ""
    """Member, run or registered model that the request names."""
    why: str = ""
    request_sha256: str = ""
    """SHA-256 of the request's bytes; empty for a request that was not read."""
    count: int = 1
    """Number of refusals that the record reports."""


@dataclass(frozen=True)
class AuditRecord:
    sequence: int
    time: str
    """Wall clock, UTC, as ISO 8601."""
    previous: str
    """Hash of the previous record; empty for the first."""
    hash: str
    fields: dict[str, Any]


def chained(sequence: int, time_s: float, entry: Entry, previous: str) -> tuple[bytes, str]:
    """Return a record as a line, with its end of line, and the record's hash. `time_s` is in seconds since 1970."""
    texts = {
        name: value[:MAX_TEXT] if isinstance(value, str) else value
        for name, value in vars(entry).items()
        if name in ("what", "result") or value not in ("", (), 1)
    }
    when = datetime.fromtimestamp(time_s, UTC).isoformat(timespec="microseconds")
    body = _json({"sequence": sequence, "time": when, **texts, "previous": previous})
    digest = hashlib.sha256(body).hexdigest()
    return body[:-1] + _HASH + digest.encode() + b'"}\n', digest


def read_line(line: bytes) -> AuditRecord:
    """Return the record of a line without its line end. Raises ValueError if it is not a record or has a wrong hash."""
    body, end = line[:-_HASH_BYTES] + b"}", line[-_HASH_BYTES:]
    if not (end.startswith(_HASH) and end.endswith(b'"}')):
        raise ValueError("the line is not a record")
    given = end[len(_HASH) : -2].decode("ascii", "replace")
    if hashlib.sha256(body).hexdigest() != given:
        raise ValueError("the hash of the record is not the hash of its content")
    try:
        fields = json.loads(line)
    except RecursionError:
        raise ValueError("the record is nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError("the record is not an object")
    sequence, time, previous = fields.get("sequence"), fields.get("time"), fields.get("previous")
    if not (isinstance(sequence, int) and isinstance(time, str) and isinstance(previous, str)):
        raise ValueError("the record lacks its sequence, time or previous hash")
    return AuditRecord(sequence, time, previous, given, fields)


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()


MAX_FILE_BYTES = 16 << 20
MAX_FILES = 64
"""Largest number of files that are kept; together they have 1 GB."""
NAME = re.compile(r"([0-9]{6,12})\.jsonl")
MAX_NUMBER = 10**12 - 2
"""Largest number of a file that is written: the number after it fits `NAME` too."""


def audit_files(folder: Path) -> dict[int, Path]:
    """Return the files of a log by number, the oldest first; empty without a folder."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := NAME.fullmatch(path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def open_file(path: Path) -> BinaryIO:
    """Open a file of the log for reading. Raises OSError, also for a folder or a device, and for a file that is larger
    than any file of a log."""
    file = open_regular(path)
    if (size := os.fstat(file.fileno()).st_size) > MAX_FILE_BYTES + MAX_LINE_BYTES:
        file.close()
        raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than a file of an audit log", str(path))
    return file


def end_of(path: Path) -> tuple[AuditHead, int]:
    """Return the newest complete record of a file (`NONE` without one) and the number of bytes of the incomplete line
    after it. Raises ValueError if the last complete line is not a record, and OSError as `open_file` does."""
    with open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 2 * MAX_LINE_BYTES))
        content = file.read()
    whole, _, torn = content.rpartition(b"\n")
    if len(torn) > MAX_LINE_BYTES:
        raise ValueError(f"it ends with {len(torn):,} bytes without a line end")
    if not whole:
        return NONE, len(torn)
    record = read_line(whole.rpartition(b"\n")[2])
    return AuditHead(record.sequence, record.hash), len(torn)


def has_record(folder: Path, head: AuditHead) -> bool:
    """Return whether the files have the record `head`, or had it before their oldest file was deleted."""
    files = list(audit_files(folder).values())
    for path in reversed(files):
        try:
            with open_file(path) as file:
                lines = file.read().splitlines()
            first = read_line(lines[0]).sequence if lines else head.sequence + 1
            if first <= head.sequence:
                index = head.sequence - first
                return index < len(lines) and read_line(lines[index]).hash == head.hash
        except (ValueError, OSError):
            return False
    return bool(files) and next(iter(audit_files(folder))) > 1


class AuditFiles:
    """The one writer of a log. The caller ensures that only one thread writes at a time."""

    def __init__(
        self,
        folder: Path,
        head: AuditHead,
        clock: Callable[[], float],
        max_file_bytes: int = MAX_FILE_BYTES,
        max_files: int = MAX_FILES,
    ):
        """`head` is the newest record that the ledger has: the log continues after it, even if the files end earlier.
        `clock` returns seconds since 1970. Raises LedgerFault if the folder cannot be written."""
        self._folder, self._clock = folder, clock
        self._max_file_bytes, self._max_files = max_file_bytes, max_files
        self.repaired: list[str] = []
        """Faults that were found when the log was opened, to be recorded."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._numbers = [number for number in audit_files(folder) if number <= MAX_NUMBER]
            self.head = self._find_end(head)
            newest = self._numbers[-1] if self._numbers else 0
            continues = _ends_with_line(folder / _name(newest))
            self._open(newest if continues else newest + 1, 0 if continues else os.O_EXCL)
        except OSError as error:
            raise LedgerFault(f"the audit log {folder} cannot be written: {error}") from error

    @property
    def number(self) -> int:
        return self._numbers[-1]

    def append(self, entry: Entry) -> AuditHead:
        """Append a record and return it as the new head. Raises OSError."""
        if self._size >= self._max_file_bytes:
            self._rotate()
        line, digest = chained(self.head.sequence + 1, self._clock(), entry, self.head.hash)
        if os.write(self._descriptor, line) != len(line):
            raise OSError("the disk took only a part of a record")
        self._size += len(line)
        self.head = AuditHead(self.head.sequence + 1, digest)
        return self.head

    def duplicate(self) -> int:
        """Return a file descriptor of the newest file, for the caller to sync and close. Earlier files are synced."""
        return os.dup(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def _find_end(self, recorded: AuditHead) -> AuditHead:
        """Cut off an incomplete line. Return the record to continue after: the ledger's newest, if the files lack
        it."""
        end = NONE
        for number in reversed(self._numbers):
            path = self._folder / _name(number)
            try:
                end, torn_bytes = end_of(path)
            except (ValueError, OSError) as fault:
                why = fault.strerror if isinstance(fault, OSError) else fault
                self.repaired.append(f"the last record of {path.name} is damaged: {why}")
                return recorded
            if torn_bytes:
                os.truncate(path, path.stat().st_size - torn_bytes)
                self.repaired.append(f"an incomplete record of {torn_bytes} bytes was cut off {path.name}")
            if end.sequence:
                break
        if recorded.sequence and not has_record(self._folder, recorded):
            self.repaired.append(
                f"the ledger has record {recorded.sequence}, but the files end with record {end.sequence}"
            )
            return recorded
        return end

    def _rotate(self) -> None:
        earlier = self._descriptor
        os.fdatasync(earlier)
        self._open(self.number + 1, os.O_EXCL)
        os.close(earlier)
        while len(self._numbers) > self._max_files:
            with contextlib.suppress(OSError):  # such as a folder of that name
                (self._folder / _name(self._numbers.pop(0))).unlink()

    def _open(self, number: int, exclusive: int) -> None:
        """Open a file for appending; with O_EXCL, a new file under the next free number. If it raises OSError, the
        file that was open stays."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW | exclusive
        while True:
            if number > MAX_NUMBER:
                raise OSError(errno.EFBIG, "the number of the newest file is too large; remove the file")
            try:
                self._descriptor = os.open(self._folder / _name(number), flags, 0o600)
                break
            except FileExistsError:
                number += 1
        self._size = os.fstat(self._descriptor).st_size
        if number not in self._numbers:
            self._numbers.append(number)
        sync_folder(self._folder)


def _ends_with_line(path: Path) -> bool:
    """Return whether records can be appended to a file."""
    try:
        with open_file(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            return file.read() in (b"", b"\n") and not path.is_symlink()
    except OSError:
        return False


def _name(number: int) -> str:
    return f"{number:06}.jsonl"

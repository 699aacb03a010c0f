"""Writes traces of a served model: every answered request, and each request with feedback once more, as rows for
training.

    requests-000001.jsonl   every choice that was sent, with `final_reward` null
    rated-000001.jsonl      the whole row again, with its score as `final_reward`

With a storage key each row is encrypted (`paceline/files/line_file.py`), and readers need the same key.

Promise: the folder stays below its size limit; the oldest files are removed. A request is written before its answer is
sent, and feedback before it is confirmed. Both survive the end of the process, but not a power cut. Feedback counts
once: the same score again changes nothing, and another score is refused. Files and lines of another kind in the folder
are left out with a warning. One thread writes; only requests under way, a bounded number, wait for it.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from paceline.chat.messages import Json
from paceline.encryption.encrypted_file import WrongKey
from paceline.encryption.storage_key import storage_key
from paceline.errors import Conflict, NotFound, Unavailable
from paceline.files.line_file import HEADER_BYTES, LineReader, LineWriter, stored_size
from paceline.host.regular_file import NO_FILE
from paceline.rate_limited_log import RateLimitedLog
from paceline.services.rollout.openai.server import FeedbackAsk

REQUESTS, RATED = "requests", "rated"
NAME = re.compile(r"(requests|rated)-([0-9]{6,15})\.jsonl")
MAX_NUMBER = 10**15 - 1
"""Largest number in a file's name."""
PARTS = 16
"""Number of files of one kind within the limit, so that a sixteenth of the room is freed at a time."""
SCORE_BYTES = 32
MAX_OPEN = 100_000
"""Number of the newest choices that can get feedback."""

log = logging.getLogger(__name__)
seldom = RateLimitedLog(log)
Key = tuple[str, int]
ResultT = TypeVar("ResultT")


@dataclass
class _Choice:
    file: Path
    offset: int
    score: float | None = None


class TraceLog:
    """The traces of one model in a folder. The caller makes sure that no other process writes there."""

    def __init__(self, folder: Path, model: str, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since 1970. Raises OSError, or WrongKey for traces under another storage key."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._model, self._max_bytes, self._clock = folder, model, max_bytes, clock
        self._open: OrderedDict[Key, _Choice] = OrderedDict()
        self._files: dict[str, LineWriter] = {}
        self._key = storage_key()
        self._file_room = max_bytes // PARTS - (0 if self._key is None else HEADER_BYTES)
        self._thread = ThreadPoolExecutor(1, "traces")
        self._read_earlier()

    async def record(self, answer_id: str, rows: Sequence[Json]) -> None:
        """Write the choices of an answer. A disk error is logged and loses these traces, but never the answer."""
        try:
            await self._run(lambda: self._record(answer_id, rows))
        except OSError as error:
            seldom.warning("traces", "requests cannot be written to %s: %s", self._folder, error)

    async def rate(self, feedback: FeedbackAsk) -> Json:
        """Record feedback and return the answer to it, whose `duplicate` is true if the same feedback was recorded
        before."""
        try:
            is_duplicate = await self._run(lambda: self._rate(feedback))
        except OSError as error:
            raise Unavailable(f"the feedback cannot be written ({error.strerror}); send it again later") from None
        return {"object": "feedback", **feedback.model_dump(), "duplicate": is_duplicate}

    def close(self) -> None:
        self._thread.shutdown()
        for file in self._files.values():
            file.close()

    async def _run(self, call: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _record(self, answer_id: str, rows: Sequence[Json]) -> None:
        for index, row in enumerate(rows):
            whole = {
                **{"id": answer_id, "choice": index, **row},
                **{"final_reward": None, "model": self._model, "time_s": self._clock()},
            }
            line = _line(whole)
            if stored_size(len(line) + SCORE_BYTES, self._key) > self._file_room:
                seldom.warning(
                    "size",
                    "a request of %d bytes is not kept as a trace: the folder's size limit is too small for it",
                    len(line),
                )
                continue
            file, offset = self._append(REQUESTS, line)
            self._note((answer_id, index), _Choice(file, offset))

    def _rate(self, feedback: FeedbackAsk) -> bool:
        """Write the rated row; return False for the first feedback on a choice, True for a repetition."""
        key = feedback.completion_id, feedback.index
        found = self._open.get(key)
        row = self._read(found) if found is not None else None
        if found is None or row is None:
            raise NotFound(
                f"no completion {feedback.completion_id!r} with the index {feedback.index} is recorded: it was never "
                f"sent, is older than the {MAX_OPEN} newest, or its trace was removed"
            )
        if found.score is not None:
            if found.score == feedback.score:
                return True
            raise Conflict(
                f"completion {feedback.completion_id!r} has the score {found.score:g} already, and the first one counts; "
                f"{feedback.score:g} is not recorded"
            )
        if row["completion"]:  # training refuses rows without a text
            self._append(RATED, _line(row | {"final_reward": feedback.score}))
        found.score = feedback.score
        return False

    def _append(self, kind: str, line: bytes) -> tuple[Path, int]:
        file = self._files.get(kind)
        if file is None or file.tell() + stored_size(len(line), self._key) > self._max_bytes // PARTS:
            file = self._next_file(kind)
        try:
            return file.path, file.write(line)
        except OSError:
            self._files.pop(kind).close()  # it may end in half a row; the next row begins a new file
            _cut_half_row(file.path)
            raise

    def _next_file(self, kind: str) -> LineWriter:
        if kind in self._files:
            self._files.pop(kind).close()
        names = filter(None, map(NAME.fullmatch, os.listdir(self._folder)))
        taken = {0, *(int(match[2]) for match in names if match[1] == kind)}
        number = max(each + 1 for each in taken if each + 1 not in taken and each < MAX_NUMBER)
        path = self._folder / f"{kind}-{number:06}.jsonl"
        self._make_room()
        self._files[kind] = LineWriter(path, self._key)
        return self._files[kind]

    def _make_room(self) -> None:
        """Remove old files, requests first, until two new ones fit."""
        room = self._max_bytes - 2 * (self._max_bytes // PARTS)
        current = {file.path for file in self._files.values()}
        candidates = [path for kind in (REQUESTS, RATED) for _, path in self._parts(kind) if path not in current]
        size = sum(path.stat().st_size for kind in (REQUESTS, RATED) for _, path in self._parts(kind))
        for path in candidates:
            if size <= room:
                return
            size -= path.stat().st_size
            path.unlink()

    def _parts(self, kind: str) -> list[tuple[int, Path]]:
        """Return number and path of the files of a kind, oldest first. Folders, links and devices are left out."""
        with os.scandir(self._folder) as entries:
            files = [Path(entry.path) for entry in entries if entry.is_file(follow_symlinks=False)]
        matches = [(NAME.fullmatch(path.name), path) for path in files]
        return sorted((int(match[2]), path) for match, path in matches if match and match[1] == kind)

    def _read(self, choice: _Choice) -> Json | None:
        """Return the row of a choice; None if its file is gone, was changed or may not be read. Raises OSError for a
        temporary fault."""
        try:
            with LineReader(choice.file, self._key) as file:
                line = file.read_at(choice.offset)
        except (FileNotFoundError, WrongKey):
            return None
        except OSError as error:
            if error.errno not in (*NO_FILE, errno.EACCES):
                raise
            seldom.warning("read", "the traces in %s cannot be read and get no feedback: %s", choice.file, error)
            return None
        return _row(line)

    def _note(self, key: Key, choice: _Choice) -> None:
        self._open[key] = choice
        while len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)

    def _read_earlier(self) -> None:
        """Load the choices of earlier processes. A process that was killed may have left half a row, which is cut off.
        Raises WrongKey for traces under another storage key."""
        left_out = 0
        for kind in (REQUESTS, RATED):
            for _, path in self._parts(kind):
                try:
                    _cut_half_row(path)
                    with LineReader(path, self._key) as file:
                        left_out += sum(not self._take(kind, path, *line) for line in _lines(file))
                except OSError as error:
                    log.warning("the traces in %s cannot be read and get no feedback: %s", path, error)
        if left_out:
            log.warning("%d lines of the files in %s are not traces, and are left out", left_out, self._folder)

    def _take(self, kind: str, path: Path, offset: int, line: bytes) -> bool:
        """Load the choice of a line; return whether the line is a trace."""
        row = _row(line)
        if row is None:
            return False
        key = row["id"], row["choice"]
        if kind == REQUESTS:
            self._note(key, _Choice(path, offset))
        elif key in self._open:
            self._open[key].score = row["final_reward"]
        return True


def _lines(file: LineReader) -> Iterator[tuple[int, bytes]]:
    """Yield the offset of each line and the line; a damaged encrypted line is yielded as empty."""
    for start, _, stored in file.stored():
        try:
            yield start, file.opened(stored, start)
        except WrongKey:
            yield start, b""


def _row(line: bytes) -> Json | None:
    """Return the trace of a line; None for any other content."""
    try:
        row = json.loads(line, parse_float=_finite, parse_constant=_finite)
        match row:
            case {"id": str(), "choice": int(), "completion": _, "final_reward": None | int() | float() as score}:
                return row if score is None or math.isfinite(score) else None
    except (ValueError, OverflowError, RecursionError):
        pass
    return None


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} cannot be written as JSON again")
    return number


def _line(row: Json) -> bytes:
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n"


def _cut_half_row(path: Path) -> None:
    with path.open("rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - (1 << 16))
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            file.truncate(end)

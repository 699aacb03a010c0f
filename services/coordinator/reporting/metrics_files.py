"""Files of a run for readers: metrics.jsonl, extra.jsonl, TensorBoard events, summary.json. They are flushed after each
step and have each step once: when a coordinator opens metrics.jsonl, it sets aside the lines that the ledger does
not know (of steps after a restored backup, or of a transaction that a kill undid)."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from paceline.encryption.storage_key import storage_key
from paceline.files.line_file import LineWriter
from paceline.files.whole_file import write_whole
from paceline.host.regular_file import fd_to_append
from paceline.services.common.worker.score_extras import EXTRA_NAME

log = logging.getLogger(__name__)
METRICS_NAME = "metrics.jsonl"
SUMMARY_NAME = "summary.json"


class MetricsFiles:
    """The metrics files of one run, in its directory. Methods raise OSError."""

    def __init__(self, directory: Path, *, tensorboard: bool, next_step: int, is_ahead: IsAhead):
        """`next_step` comes from the ledger; `is_ahead` returns True for a line that the ledger does not know."""
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        path = directory / METRICS_NAME
        number = set_aside(path, is_ahead)
        if number:
            log.warning("%d lines of %s are ahead of the ledger; they were moved to %s.set-aside", number, path, path)
        self._lines = os.fdopen(fd_to_append(path), "a")
        self._key = storage_key()
        if tensorboard and self._key is not None:
            log.info("%s: no texts are written for TensorBoard, because of the storage key", directory)
        self._extra: LineWriter | None = None
        self._events = None
        if tensorboard:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            try:
                self._events = EventFileWriter(str(directory / "tensorboard"), flush_secs=10)
            except OSError:
                self._lines.close()
                raise
            if number:
                self._hide_from(next_step)

    def _hide_from(self, step: int) -> None:
        """Make TensorBoard hide earlier values of this step and later ones."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        started = SessionLog(status=SessionLog.START)
        if self._events is not None:
            self._events.add_event(Event(wall_time=time.time(), step=step, session_log=started))

    def write(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        """Write one line of metrics.jsonl, and the same scalars for TensorBoard. Not-a-number becomes null."""
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._lines.write(json.dumps({"kind": kind, "step": step, "time": time.time(), **values}) + "\n")
        self._lines.flush()
        if self._events is not None:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary

            scalars = [
                Summary.Value(tag=f"{kind}/{name}", simple_value=value)
                for name, value in values.items()
                if value is not None
            ]
            self._events.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))

    def write_text(self, tag: str, step: int, text: str) -> None:
        """Write a text (Markdown) for TensorBoard; nothing if it is empty, if there is no TensorBoard, or with a
        storage key, because TensorBoard's files are not encrypted."""
        if self._events is None or not text or self._key is not None:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
        plugin = SummaryMetadata.PluginData(plugin_name="text")
        value = Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)
        self._events.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=[value])))

    def write_extra(self, line: str) -> None:
        """Write a line of extra.jsonl, created with the first line and encrypted if there is a storage key."""
        if self._extra is None:
            self._extra = LineWriter(self.directory / EXTRA_NAME, self._key)
        self._extra.write(line.encode())

    def close(self) -> None:
        self._lines.close()
        if self._extra is not None:
            self._extra.close()
        if self._events is not None:
            self._events.close()


def write_summary(directory: Path, summary: dict[str, Any]) -> None:
    """Write summary.json atomically, as one object."""
    write_whole(directory / SUMMARY_NAME, json.dumps(summary, indent=2) + "\n")


BLOCK_BYTES = 1 << 20

IsAhead = Callable[[str, int], bool]
"""Function that returns True if the ledger does not know the line of a kind and step."""


def set_aside(path: Path, is_ahead: IsAhead, block_bytes: int = BLOCK_BYTES) -> int:
    """Move lines that are ahead of the ledger, and incomplete lines, to the end of `<path>.set-aside`; return their
    number. The file is read from its end, up to the newest line of a trained step that the ledger knows, because the
    lines before it are older. Raises OSError."""
    if not path.is_file():
        return 0
    with path.open("r+b") as file:
        start, lines = _tail(file, is_ahead, block_bytes)
        ahead = [line for line in lines if _is_ahead(line, is_ahead)]
        kept = [line for line in lines if not _is_ahead(line, is_ahead)]
        if not ahead:
            return 0
        with path.with_name(f"{path.name}.set-aside").open("ab") as aside:
            aside.writelines(line if line.endswith(b"\n") else line + b"\n" for line in ahead)
        file.seek(start)
        file.truncate()
        file.writelines(kept)
    return len(ahead)


def _tail(file: BinaryIO, is_ahead: IsAhead, window: int) -> tuple[int, list[bytes]]:
    """Return the lines after the newest line of a trained step that the ledger knows, and their offset."""
    size = file.seek(0, os.SEEK_END)
    while True:
        start = max(0, size - window)
        file.seek(start)
        lines = file.read(size - start).splitlines(keepends=True)
        if start and lines:
            start += len(lines.pop(0))  # the first line may be incomplete
        for index in range(len(lines) - 1, -1, -1):
            kind, step = _kind_and_step(lines[index])
            if kind == "train" and not is_ahead(kind, step):
                return start + sum(map(len, lines[: index + 1])), lines[index + 1 :]
        if window >= size:
            return start, lines
        window *= 4


def _is_ahead(line: bytes, is_ahead: IsAhead) -> bool:
    kind, step = _kind_and_step(line)
    return not kind or is_ahead(kind, step)


def _kind_and_step(line: bytes) -> tuple[str, int]:
    """Return kind and step of a line; no kind if the line is incomplete."""
    if not line.endswith(b"\n"):
        return "", 0
    try:
        content = json.loads(line)
        return str(content["kind"]), int(content["step"])
    except (ValueError, TypeError, KeyError):
        return "", 0

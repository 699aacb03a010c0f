"""Files of a run for readers: metrics.jsonl, extra.jsonl, TensorBoard events, summary.json. Flushed after each step, each step once."""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path
from typing import Any

from paceline.encryption.storage_key import storage_key
from paceline.files.line_file import LineWriter
from paceline.files.whole_file import write_whole
from paceline.services.common.logged_extra import EXTRA_NAME
from paceline.services.coordinator.reporting import metrics_lines

log = logging.getLogger(__name__)
METRICS_NAME = "metrics.jsonl"
SUMMARY_NAME = "summary.json"


class MetricsFiles:
    """The metrics files of one run, in its directory. Methods raise OSError."""

    def __init__(
        self, directory: Path, *, tensorboard: bool, next_step: int, is_ahead: metrics_lines.IsAhead
    ):
        """`next_step` is the run's by the ledger; `is_ahead` returns whether the ledger does not know a line."""
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        path = directory / METRICS_NAME
        number = metrics_lines.set_aside(path, is_ahead)
        if number:
            log.warning(
                "%d lines of %s are ahead of the ledger; they are in %s.set-aside now", number, path, path
            )
        self._lines = path.open("a")
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
        """Make TensorBoard hide its values of this step and later ones."""
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
        """Write a text (Markdown) for TensorBoard; nothing if it is empty, there is no TensorBoard, or files are encrypted with a
        storage key, because TensorBoard's are plain."""
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
        """Write a line of extra.jsonl, which is made with the first, encrypted with the storage key where there is one."""
        if self._extra is None:
            self._extra = LineWriter(self.directory / EXTRA_NAME, self._key)
        self._extra.write(line.encode())

    def close(self) -> None:
        """Flush and close the files."""
        self._lines.close()
        if self._extra is not None:
            self._extra.close()
        if self._events is not None:
            self._events.close()


def write_summary(directory: Path, summary: dict[str, Any]) -> None:
    """Write summary.json as one object, whole or not at all."""
    write_whole(directory / SUMMARY_NAME, json.dumps(summary, indent=2) + "\n")

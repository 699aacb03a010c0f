"""Writes a run as TensorBoard's event files on this machine, for people who have only the coordinator's address.

On the coordinator's host the run's folder has such files already (`logger.tensorboard`). One event holds all values of
an entry, with the sequence number that says where to resume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.apps.tracking.tracker import AlertKind, Row, Step, Tracker, as_table, library

SEQUENCE = "paceline/sequence"
EVENT_FILES = "events.out.tfevents.*"


class TensorboardRun(Tracker):
    def __init__(self, folder: Path):
        self._folder = folder / "tensorboard"
        self._position = recorded_position(self._folder)
        writer = library("tensorboard.summary.writer.event_file_writer").EventFileWriter
        self._writer: Any = writer(str(self._folder), flush_secs=10)
        self._event: Any = library("tensorboard.compat.proto.event_pb2").Event
        self._summary: Any = library("tensorboard.compat.proto.summary_pb2")

    def position(self) -> int | None:
        """Return the largest sequence number in the event files that existed when this run was opened."""
        return self._position

    def log(self, step: Step, metrics: Mapping[str, float], samples: Sequence[Row]) -> None:
        """Write the metrics, and the samples as a Markdown table, as one event, and flush it to the file."""
        # As text, because a 32-bit float is exact only below 2^24.
        values = [self._text(SEQUENCE, str(step.sequence))]
        values += [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        if samples:
            values.append(self._text("train/samples", _markdown(*as_table(list(samples)))))
        self._write(step, values)

    def alert(self, step: Step, kind: AlertKind, text: str) -> None:
        self._write(step, [self._text(SEQUENCE, str(step.sequence)), self._text("warnings", _code(text))])

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: Step, values: list[Any]) -> None:
        summary = self._summary.Summary(value=values)
        self._writer.add_event(self._event(wall_time=step.time_s, step=step.number, summary=summary))
        self._writer.flush()

    def _text(self, tag: str, text: str) -> Any:
        tensor = library("tensorboard.compat.proto.tensor_pb2").TensorProto
        shapes = library("tensorboard.compat.proto.tensor_shape_pb2").TensorShapeProto
        string = library("tensorboard.compat.proto.types_pb2").DT_STRING
        shape = shapes(dim=[shapes.Dim(size=1)])
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        return self._summary.Summary.Value(
            tag=tag,
            metadata=self._summary.SummaryMetadata(plugin_data=plugin),
            tensor=tensor(dtype=string, string_val=[text.encode()], tensor_shape=shape),
        )


def recorded_position(folder: Path) -> int:
    """Return the largest sequence number in the event files of a folder; 0 without any."""
    return max((int(values[SEQUENCE]) for _, values in events(folder) if SEQUENCE in values), default=0)


def events(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the step of each event, and its values by tag; texts stay texts. A truncated file is read up to its end."""
    loader = library("tensorboard.backend.event_processing.event_file_loader").LegacyEventFileLoader
    return [
        (int(event.step), {value.tag: _value(value) for value in event.summary.value})
        for path in sorted(folder.glob(EVENT_FILES))
        for event in loader(str(path)).Load()
    ]


def _value(value: Any) -> Any:
    return value.tensor.string_val[0].decode() if value.tensor.string_val else float(value.simple_value)


def _markdown(columns: list[str], lines: list[list[Any]]) -> str:
    """Return one block for each row, in which every character is escaped for display."""
    return "\n\n---\n\n".join(
        "\n\n".join(f"**{name}**\n\n{_code(str(cell))}" for name, cell in zip(columns, line, strict=True))
        for line in lines
    )


def _code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])

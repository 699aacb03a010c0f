"""Records of other systems as rows of traces: OpenTelemetry spans and rollouts of verifiers, by line.

Promise: every record becomes a row or is counted by the reason for which it was left out; a line that is no record is refused
with its file and number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.apps.traces.spans import (
    Json,
    Score,
    Unusable,
    events_of,
    is_telemetry,
    rows_of_span,
    score_of,
    spans_of,
)
from paceline.apps.traces.verifiers import is_rollout, row_of_rollout
from paceline.data.json_rows import parse_line
from paceline.errors import DataError, Unreadable
from paceline.regular_file import open_regular

COLUMNS = (
    "prompt", "completion", "final_reward", "tools", "prompt_ids", "token_ids", "logprobs", "finish_reason", "model",
    "response_id", "trace_id", "span_id",
)  # fmt: skip
"""Columns of every row; null where a record has no value."""


@dataclass
class ConversionReport:
    """Counts of what was read and left out."""

    rows: int = 0
    with_reward: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Records by reason."""

    def facts(self) -> Json:
        """Return the counts as JSON."""
        return {**vars(self), "left_out": dict(self.left_out)}


class Scores:
    """Scores of responses by the ids of spans and responses. Of several with one name the last counts."""

    def __init__(self, scores: Iterable[Score], names: Sequence[str]) -> None:
        """`names` choose evaluations, whose values are added up; none chooses the only one that there is. Raises DataError."""
        found = list(scores)
        there = sorted({score.name for score in found})
        if missing := sorted(set(names) - set(there)):
            raise DataError(
                f"no evaluation {missing[0]!r}; there are: {', '.join(map(repr, there)) or 'none'}"
            )
        if not names and len(there) > 1:
            raise DataError(
                f"the files have evaluations of several names ({', '.join(map(repr, there))}); choose with --score those whose "
                "sum is the reward"
            )
        self._by_id: dict[str, dict[str, float]] = {}
        for score in found:
            for key in filter(None, (score.span_id, score.response_id)):
                if not names or score.name in names:
                    self._by_id.setdefault(key, {})[score.name] = score.value

    def of(self, row: Json) -> float | None:
        """Return the reward of a row; None where nobody judged it."""
        for key in (row["span_id"], row["response_id"]):
            if key and key in self._by_id:
                return sum(self._by_id[key].values())
        return None


def convert(
    files: Sequence[Path], score_names: Sequence[str], report: ConversionReport
) -> Iterator[dict[str, Any]]:
    """Yield the traces of all files, in their order. Scores may be in other files than their spans. Raises DataError, Unreadable."""
    scores = Scores(_scores(files), score_names)
    for record, where in _records(files):
        try:
            for row in _rows(record, scores, report):
                report.rows += 1
                report.with_reward += row["final_reward"] is not None
                yield {name: row.get(name) for name in COLUMNS}
        except DataError as error:
            raise DataError(f"{where}: {error}") from None


def _rows(record: Json, scores: Scores, report: ConversionReport) -> Iterator[Json]:
    if is_rollout(record):
        try:
            yield row_of_rollout(record)
        except Unusable as reason:
            report.left_out[str(reason)] += 1
        return
    if not is_telemetry(record):
        raise DataError(
            f"an object with the columns {sorted(record)!r:.120} is neither OpenTelemetry JSON (resourceSpans, or a span with "
            "context and attributes) nor a rollout of verifiers (nodes, task); rows of prompt and completion need no conversion"
        )
    for span in spans_of(record):
        try:
            rows = rows_of_span(span)
        except Unusable as reason:
            report.left_out[str(reason)] += 1
            continue
        reward = scores.of(rows[0])
        if reward is not None and len(rows) > 1:
            report.left_out["one score for several choices"] += len(rows)
            continue
        yield from ({**row, "final_reward": reward} for row in rows)


def _scores(files: Sequence[Path]) -> Iterator[Score]:
    for record, where in _records(files):
        try:
            for event in events_of(record) if is_telemetry(record) else ():
                if (score := score_of(event)) is not None:
                    yield score
        except DataError as error:
            raise DataError(f"{where}: {error}") from None


def _records(files: Sequence[Path]) -> Iterator[tuple[Json, str]]:
    """Yield each line's object, and its place. Raises DataError, Unreadable."""
    for path in files:
        try:
            file = open_regular(path)
        except OSError as error:
            raise Unreadable(f"{path} cannot be read: {error.strerror}") from None
        with file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield parse_line(path, number, line), f"{path}, line {number}"

"""Converts other systems' files to traces, line by line: OpenTelemetry spans, and rollouts of verifiers.

Promise: every entry becomes a row or is counted with the reason for leaving it out; a line of any other form is refused
with its file and number.

An entry of the library verifiers (0.2 and later, `traces.jsonl`) is one rollout: a graph of messages (`nodes`, each
with its parent), and rewards with weights. If its nodes have tokens, masks and log-probabilities, the row has them as
those of the behaviour policy; otherwise the row is text. Only rollouts of one answer become traces, because a trace has
one prompt; others are left out and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.apps.traces.spans import Json, Score, Unusable, events_of, is_telemetry, rows_of_span, score_of, spans_of
from paceline.data.json_rows import parse_line
from paceline.errors import DataError, Unreadable
from paceline.host.regular_file import open_regular

COLUMNS = (
    "prompt", "completion", "final_reward", "tools", "prompt_ids", "token_ids", "logprobs", "finish_reason", "model",
    "response_id", "trace_id", "span_id",
)  # fmt: skip
"""Columns of every row; null if an entry has no value."""


@dataclass
class ConversionReport:
    """Counts of entries read and left out."""

    rows: int = 0
    with_reward: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Maps a reason to the number of entries that were left out for it."""

    def facts(self) -> Json:
        return {**vars(self), "left_out": dict(self.left_out)}


class Scores:
    """Scores of responses by the id of the span or of the response; of several scores with one name the last counts."""

    def __init__(self, scores: Iterable[Score], names: Sequence[str]) -> None:
        """`names` choose evaluations, whose values are added up; default: the only evaluation. Raises DataError."""
        found = list(scores)
        there = sorted({score.name for score in found})
        if missing := sorted(set(names) - set(there)):
            raise DataError(f"no evaluation {missing[0]!r}; there are: {', '.join(map(repr, there)) or 'none'}")
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
        """Return the reward of a row; None without a score."""
        for key in (row["span_id"], row["response_id"]):
            if key and key in self._by_id:
                return sum(self._by_id[key].values())
        return None


def convert(files: Sequence[Path], score_names: Sequence[str], report: ConversionReport) -> Iterator[dict[str, Any]]:
    """Yield all files' traces, in order. Scores may be in other files than their spans. Raises DataError, Unreadable."""
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
    for path in files:
        try:
            file = open_regular(path)
        except OSError as error:
            raise Unreadable(f"{path} cannot be read: {error.strerror}") from None
        with file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield parse_line(path, number, line), f"{path}, line {number}"


def is_rollout(record: Mapping[str, Any]) -> bool:
    return isinstance(record.get("nodes"), list) and "task" in record


def row_of_rollout(record: Mapping[str, Any]) -> Json:
    """Return the row of a rollout. Raises Unusable."""
    nodes = record["nodes"]
    sampled = [index for index, node in enumerate(nodes) if node.get("sampled")]
    if not sampled:
        raise Unusable("no answer of the model")
    if len(sampled) > 1:
        raise Unusable("several answers in one rollout")
    path = _path(nodes, sampled[0])
    messages = [_message(node["message"]) for node in path]
    row: Json = {
        "prompt": messages[:-1],
        "completion": messages[-1:],
        "final_reward": _reward(record.get("rewards")),
        "tools": _tools(record.get("tools")),
        "trace_id": record.get("id"),
    }
    tokens = _tokens(path)
    return row if tokens is None else row | tokens


def _path(nodes: list[Any], index: int | None) -> list[Json]:
    path: list[Json] = []
    while index is not None:
        if not 0 <= index < len(nodes) or len(path) == len(nodes):
            raise Unusable("a message whose parents are missing")
        path.append(nodes[index])
        index = nodes[index].get("parent")
    return path[::-1]


def _message(message: Mapping[str, Any]) -> Json:
    calls = [
        {"id": call.get("id"), "type": "function", "function": {key: call.get(key) for key in ("name", "arguments")}}
        for call in message.get("tool_calls") or ()
    ]
    kept = {key: message[key] for key in ("role", "reasoning_content", "tool_call_id") if message.get(key)}
    return kept | {"content": message.get("content") or ""} | ({"tool_calls": calls} if calls else {})


def _reward(rewards: Any) -> float | None:
    """Return the sum of the weighted rewards; None if the rollout has none."""
    if not rewards:
        return None
    values = [
        value["score"] * value.get("weight", 1.0) if isinstance(value, Mapping) else value for value in rewards.values()
    ]
    return float(sum(values))


def _tools(tools: Any) -> list[Json] | None:
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools or ()] or None


def _tokens(path: list[Json]) -> Json | None:
    """Return prompt, completion and log-probabilities in tokens; None unless they are recorded for the whole answer."""
    answer = path[-1]
    mask, logprobs = answer.get("mask") or [], answer.get("logprobs") or []
    length = sum(mask)
    if not length or len(logprobs) != length or len(mask) != len(answer["token_ids"]) or not all(mask[-length:]):
        return None
    before = [token for node in path[:-1] for token in node.get("token_ids") or ()]
    prompt_ids = [*before, *answer["token_ids"][:-length]]
    if not prompt_ids:
        return None
    return {"prompt_ids": prompt_ids, "token_ids": answer["token_ids"][-length:], "logprobs": logprobs}

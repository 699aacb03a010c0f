"""The entries of a run for trackers, from its recorded events: steps and evaluations with metrics and samples, warnings, the end."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from paceline.apps.tracking.names import Style, renamed
from paceline.apps.tracking.tracker import AlertKind, Row, Step, finite
from paceline.errors import NotFound
from paceline.records import RecordedEvent, Records
from paceline.services.common.reporting.terminal import visible

KINDS = ("step", "evaluation", "warning", "state")
NOT_METRICS = {"step", "time", "sequence"}


class Entry(NamedTuple):
    """One event, as a tracker takes it."""

    step: Step
    metrics: dict[str, float]
    samples: tuple[Row, ...] = ()
    text: str = ""
    """A warning, or why the state changed."""
    alert: AlertKind | None = None
    state: str = ""
    """New state of the run, if it changed here."""


def entries(
    records: Records, run_id: str, *, after: int, time_s: float, names: Style, samples: int
) -> Iterator[Entry]:
    """Yield what happened after a sequence number, oldest first. An event without a time of its own gets that of the one before, at
    first `time_s`, so that each repetition is the same. Raises NotFound, Unavailable."""
    for event in records.events(run_id, kinds=KINDS, after=after):
        recorded = event.content.get("time")
        time_s = float(recorded) if isinstance(recorded, int | float) else time_s
        number = event.content.get("step")
        step = Step(number if isinstance(number, int) else event.at_step, event.sequence, time_s)
        yield _entry(records, run_id, event, step, names, samples)


def _entry(
    records: Records, run_id: str, event: RecordedEvent, step: Step, names: Style, samples: int
) -> Entry:
    if event.kind == "warning":
        alert: AlertKind = (
            "stalled" if event.content.get("stalled") else "rule" if event.content.get("rule") else "warning"
        )
        return Entry(step, {}, text=_message(event), alert=alert)
    if event.kind == "state":
        return Entry(step, {}, text=_message(event), state=str(event.content.get("state", "")))
    metrics = {
        renamed(event.kind, name, names): value
        for name, value in event.content.items()
        if name not in NOT_METRICS and isinstance(value, int | float) and not isinstance(value, bool)
    }
    rows = tuple(_rows(records, run_id, step.number, samples)) if event.kind == "step" and samples else ()
    return Entry(step, finite(metrics), rows)


def _message(event: RecordedEvent) -> str:
    return visible(str(event.content.get("message", "")))


def _rows(records: Records, run_id: str, step: int, groups: int) -> Iterator[Row]:
    """Yield a row for each completion of the first groups of a step; none where samples are not kept."""
    found = records.sample_groups(run_id, from_step=step, to_step=step, page_size=groups)
    try:
        for group in itertools.islice(found, groups):
            prompt: Any = json.loads(group.prompt_json)
            text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
            for completion in group.completions:
                yield {
                    "step": step,
                    "group": group.group_id,
                    "prompt": visible(text),
                    "completion": visible(completion.text),
                    "reward": completion.reward if completion.HasField("reward") else None,
                    **{f"reward/{name}": value for name, value in sorted(completion.rewards.items())},
                    "tokens": completion.num_tokens,
                    "age": completion.age,
                    "versions": " ".join(map(str, completion.versions)),
                    "finish_reason": completion.finish_reason,
                }
    except NotFound:  # the step's groups have left the ledger
        return


def as_table(rows: tuple[Row, ...] | list[Row]) -> tuple[list[str], list[list[Any]]]:
    """Return columns and lines; a row without a column has None there."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return columns, [[row.get(name) for name in columns] for row in rows]

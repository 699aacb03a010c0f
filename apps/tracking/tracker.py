"""Defines the interface between a run's records and a tracker: entries from recorded events, and a tracker's methods.

A tracker gets the entries of a run in order, each with the sequence number of the run's event. `position` returns the
last number that the tracker has, and a repeated `log` or `alert` of the same entry changes nothing.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, NamedTuple

from paceline.apps.tracking.names import Style, renamed
from paceline.errors import InvalidInput, NotFound
from paceline.records import RecordedEvent, Records
from paceline.services.common.reporting.terminal import visible

Row = dict[str, Any]
"""One completion, as a row of a samples table."""


AlertKind = Literal["rule", "stalled", "warning"]
"""A broken rule, a stall, or any other warning."""
TITLES: dict[AlertKind, str] = {"rule": "Rule broken", "stalled": "Run stalls", "warning": "Warning"}


class Refused(InvalidInput):
    """The tracker refuses this entry permanently; it is left out."""


class Step(NamedTuple):
    """Step, sequence number and time of an entry."""

    number: int
    """Step of the run, or of the evaluated version."""
    sequence: int
    """Sequence number of the event; grows from entry to entry."""
    time_s: float
    """Seconds since 1970; the same at each repetition."""


class TrackedRun(NamedTuple):
    """A run as it is presented to its tracker."""

    run_id: str
    identity: str
    """Unique name that identifies the run at the tracker, from the cursor's file."""
    config: dict[str, Any]
    links: dict[str, str]
    """Links to the run: the coordinator or the ledger, and the page."""


class Tracker:
    """One run at one tracker. Methods raise Refused for an entry that can never be sent, and any other exception while
    the tracker cannot be reached; the caller then opens the tracker again. Entries of an unsupported kind are
    skipped."""

    url = ""
    """URL of the run for people; empty if unknown."""

    def position(self) -> int | None:
        """Return the number up to which the tracker has all entries; None if unknown; then the cursor counts."""
        return None

    def log(self, step: Step, metrics: Mapping[str, float], samples: Sequence[Row]) -> None:
        """Send metrics (a mapping from name to value) and a table of samples."""

    def alert(self, step: Step, kind: AlertKind, text: str) -> None:
        """Send a warning."""

    def change_state(self, step: Step, state: str, message: str) -> None:
        """Set the run's new state, such as `running` or `failed`, and the reason."""

    def close(self) -> None:
        """Close the tracker; the run may be opened again."""


def library(name: str) -> ModuleType:
    """Import a tracker's library. Raises NotFound with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise NotFound(
            f"the tracker needs {error.name}, which is not installed; run `pip install 'paceline[trackers]'`"
        ) from None


def finite(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if value is not None and value == value and abs(value) != float("inf")
    }


KINDS = ("step", "evaluation", "warning", "state")
NOT_METRICS = {"step", "time", "sequence"}


class Entry(NamedTuple):
    """One event in the form for trackers."""

    step: Step
    metrics: dict[str, float]
    samples: tuple[Row, ...] = ()
    text: str = ""
    """A warning, or the reason of a change of state."""
    alert: AlertKind | None = None
    state: str = ""
    """New state of the run, if it changed; else empty."""


def entries(records: Records, run_id: str, *, after: int, time_s: float, names: Style, samples: int) -> Iterator[Entry]:
    """Yield the entries after a sequence number, oldest first. An event without a time gets the time of the event
    before it, and the first event `time_s`, so that each repetition is the same. Raises NotFound, Unavailable."""
    for event in records.events(run_id, kinds=KINDS, after=after):
        recorded = event.content.get("time")
        time_s = float(recorded) if isinstance(recorded, int | float) else time_s
        number = event.content.get("step")
        step = Step(number if isinstance(number, int) else event.at_step, event.sequence, time_s)
        yield _entry(records, run_id, event, step, names, samples)


def _entry(records: Records, run_id: str, event: RecordedEvent, step: Step, names: Style, samples: int) -> Entry:
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
    except NotFound:  # the ledger no longer has the step's groups
        return


def as_table(rows: tuple[Row, ...] | list[Row]) -> tuple[list[str], list[list[Any]]]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return columns, [[row.get(name) for name in columns] for row in rows]

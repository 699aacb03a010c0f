"""The seam between the records of a run and a tracker.

A tracker gets the entries of a run in order. It is told the sequence number of each, which is that of the run's event, so that it can
recognize what it already has: `position` says up to where, and a repeated `log` or `alert` of the same entry changes nothing there.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, NamedTuple

from paceline.errors import InvalidInput, NotFound

Row = dict[str, Any]
"""One completion: the row of a samples table."""


AlertKind = Literal["rule", "stalled", "warning"]
"""A broken rule, a stall, or any other warning."""
TITLES: dict[AlertKind, str] = {"rule": "Rule broken", "stalled": "Run stalls", "warning": "Warning"}


class Refused(InvalidInput):
    """The tracker refuses this entry and would refuse it again; it is left out."""


class Step(NamedTuple):
    """When an entry happened."""

    number: int
    """Step of the run; of an evaluation the version."""
    sequence: int
    """Sequence number of the event; grows from entry to entry."""
    time_s: float
    """Seconds since 1970; the same at each repetition."""


class TrackedRun(NamedTuple):
    """The run as its tracker presents it."""

    run_id: str
    identity: str
    """Unique name, kept beside the cursor: the tracker's run is found again by it."""
    config: dict[str, Any]
    """The resolved spec."""
    links: dict[str, str]
    """Where the run is: the coordinator or the ledger, and the page."""


class Tracker:
    """One run at one tracker. Methods raise Refused for an entry that can never be sent, and any other exception while the
    tracker cannot be reached; the caller opens it again then. A tracker leaves out what it has no place for."""

    url = ""
    """Where people see the run; empty if that is not known."""

    def position(self) -> int | None:
        """Return the sequence number up to which the tracker has all entries; None where it cannot say, and the caller's
        record counts."""
        return None

    def log(self, step: Step, metrics: Mapping[str, float], samples: Sequence[Row]) -> None:
        """Send metrics by name and a table of samples."""

    def alert(self, step: Step, kind: AlertKind, text: str) -> None:
        """Send a warning."""

    def change_state(self, step: Step, state: str, message: str) -> None:
        """Take the run's new state, as `running` or `failed`, and why."""

    def close(self) -> None:
        """End; the run may go on in a further life."""


def library(name: str) -> ModuleType:
    """Import a tracker's library. Raises NotFound with the way to install it."""
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

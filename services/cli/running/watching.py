"""`follow`: a run on the screen until it has ended, and its outcome; `wait_for`: the outcome alone, as an exit status."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.client import ENDED_STATES, Client
from services.cli import render
from services.cli.running.progress import Course, Shown, screen
from services.common.options import print_json

EXITS = {"succeeded": 0, "failed": 1, "cancelled": 3, "paused": 4}
"""Exit status of `paceline submit --wait` by the run's state; 2 is click's, for a misspelt command."""

if TYPE_CHECKING:
    from services.cli.recorded.offline import RecordedRuns


def follow(
    source: Client | RecordedRuns,
    run_id: str,
    *,
    shown: Shown,
    after: int = 0,
    earlier: int = 0,
) -> None:
    """Print a run's events after the sequence number `after` until it has ended. Those up to `earlier` are summed up in a
    line. Exits with status 1 unless it succeeded. Raises NotFound, Unavailable.

    Of a directory's records it prints what is there, also of a run that has not ended.
    """
    facts = render.run_facts(source.get(run_id))
    is_live = isinstance(source, Client) and facts["state"] not in ENDED_STATES
    course = Course(facts["max_num_steps"], live_from=facts["step"] if is_live else math.inf)
    told, is_queued = "", facts["state"] == "queued"
    with screen(run_id, course, shown, earlier) as show:
        for event in source.watch(run_id, after):
            show(event)
            if event.kind != "state" or event.sequence <= earlier:
                continue
            told = str(event.content.get("message", ""))
            if (
                event.content.get("state") == "queued"
                and is_queued
                and (advice := queued_behind(source, run_id))
            ):
                click.echo(advice, err=True)
    facts = render.run_facts(source.get(run_id))
    if not shown.as_json:
        once = facts | ({"message": ""} if facts["message"] == told else {})
        click.echo(render.outcome(once, course.evaluations, _summary(facts), course.rewards))
    if facts["state"] != "succeeded":
        raise click.exceptions.Exit(1)


def wait_for(client: Client, run_id: str, shown: Shown) -> None:
    """Return when a run has succeeded; exit with the status of `EXITS` when it ends otherwise, or is paused. Coordinators may
    restart meanwhile. Raises NotFound, Unavailable."""
    for event in client.watch(run_id):
        if event.kind == "state" and event.content.get("state") in EXITS:
            break
    facts = render.run_facts(client.get(run_id))
    if shown.as_json:
        print_json(facts)
    else:
        said = f": {facts['message']}" if facts["message"] else ""
        click.echo(
            f"run {run_id} is {facts['state']} at step {facts['step']}{said}",
            err=facts["state"] != "succeeded",
        )
    if status := EXITS.get(facts["state"], 0):
        raise click.exceptions.Exit(status)


def queued_behind(source: Client | RecordedRuns, run_id: str) -> str:
    """Return which open run is in front of a queued one, and how to end it; empty if none is."""
    for run in source.runs():
        facts = render.run_facts(run)
        if facts["run_id"] == run_id:
            return ""
        if facts["state"] not in ENDED_STATES:
            steps = f"{facts['state']}, step {facts['step']} of {facts['max_num_steps']}"
            return f"{run_id} waits for {facts['run_id']} ({steps}); `paceline cancel {facts['run_id']}` ends that run"
    return ""


def _summary(facts: render.Facts) -> dict[str, Any]:
    """Return the run's summary.json if its directory is on this machine."""
    path = Path(facts["directory"]) / "summary.json"
    try:
        summary: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return summary

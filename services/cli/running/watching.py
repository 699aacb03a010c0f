"""`follow` shows a run until it has ended; `wait_for` returns only its outcome, as an exit status."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.client import ENDED_STATES, Client
from paceline.errors import PacelineError
from paceline.services.cli import render
from paceline.services.cli.running.progress import Course, Shown, screen
from paceline.services.common.options import print_json
from paceline.services.common.reporting.terminal import visible

EXITS = {"succeeded": 0, "failed": 1, "cancelled": 3, "paused": 4}
"""Maps a run's state to the exit status of `paceline submit --wait`; 2 is click's status for a misspelt command."""
QUEUE_S = 2.0
"""Seconds between two queries for the run that a queued run waits for."""

if TYPE_CHECKING:
    from paceline.services.cli.recorded.source import Source


def follow(source: Source, run_id: str, *, shown: Shown, after: int = 0, earlier: int = 0) -> None:
    """Print a run's events after the sequence number `after` until it has ended; one line summarizes the events up to
    `earlier`. From a directory, print the recorded events, also of an open run. Exits with status 1 unless the run
    succeeded. Raises NotFound, Unavailable."""
    facts = render.run_facts(source.get(run_id))
    is_live = isinstance(source, Client) and facts["state"] not in ENDED_STATES
    course = Course(facts["max_num_steps"], live_from=facts["step"] if is_live else math.inf)
    last_message = ""
    with contextlib.ExitStack() as waiting, screen(run_id, course, shown, earlier) as show:
        if facts["state"] == "queued":
            every_s = QUEUE_S if isinstance(source, Client) else None
            waiting.enter_context(queue_shown(source, run_id, every_s))
        for event in source.watch(run_id, after):
            show(event)
            if event.kind != "state" or event.sequence <= earlier:
                continue
            last_message = str(event.content.get("message", ""))
            if event.content.get("state") != "queued":
                waiting.close()
    facts = render.run_facts(source.get(run_id))
    if not shown.as_json:
        once = facts | ({"message": ""} if facts["message"] == last_message else {})
        click.echo(render.outcome(once, course.evaluations, _summary(facts), course.values, course.measure))
    if facts["state"] != "succeeded":
        raise click.exceptions.Exit(1)


def wait_for(client: Client, run_id: str, shown: Shown) -> None:
    """Return when a run has succeeded, also over restarts; else exit as `EXITS` says. Raises NotFound, Unavailable."""
    for event in client.watch(run_id):
        if event.kind == "state" and event.content.get("state") in EXITS:
            break
    facts = render.run_facts(client.get(run_id))
    if shown.as_json:
        print_json(facts)
    else:
        reason = f": {facts['message']}" if facts["message"] else ""
        verb = render.VERBS.get(str(facts["state"]), "is")
        click.echo(
            visible(f"run {run_id} {verb} {facts['state']} at step {facts['step']}{reason}"),
            err=facts["state"] != "succeeded",
        )
    if status := EXITS.get(facts["state"], 0):
        raise click.exceptions.Exit(status)


@contextlib.contextmanager
def queue_shown(source: Source, run_id: str, every_s: float | None) -> Iterator[None]:
    """Print on stderr which run a queued run waits for; check this every `every_s` seconds, and print changes."""
    shown = _tell(source, run_id, ())
    if every_s is None:
        yield
        return
    begun = threading.Event()

    def tell() -> None:
        before = shown
        while not begun.wait(every_s):
            with contextlib.suppress(PacelineError):  # the run's events show when its coordinator is away
                before = _tell(source, run_id, before)

    threading.Thread(target=tell, name="queue", daemon=True).start()
    try:
        yield
    finally:
        begun.set()


def _tell(source: Source, run_id: str, shown: tuple[str, ...]) -> tuple[str, ...]:
    """Print the run that `run_id` waits for unless it equals `shown`; return its id, state and message, or nothing."""
    ahead = in_front_of(source, run_id)
    if ahead is None:
        return ()
    state = (ahead["run_id"], ahead["state"], ahead["message"])
    if state != shown:
        click.echo(visible(advice(run_id, ahead)), err=True)
    return state


def in_front_of(source: Source, run_id: str) -> render.Facts | None:
    """Return the run that a queued run waits for: the running one, else the oldest open one before it; None if it waits
    for none."""
    runs = list(source.runs())
    position = next((i for i, run in enumerate(runs) if run.run_id == run_id), len(runs))
    others = [(i < position, render.run_facts(run)) for i, run in enumerate(runs) if i != position]
    running = [run for _, run in others if run["state"] == "running"]
    earlier = [run for is_before, run in others if is_before and run["state"] not in ENDED_STATES]
    return next(iter([*running, *earlier]), None)


def advice(run_id: str, ahead: render.Facts) -> str:
    """Return a sentence that names the run `ahead`, for which the queued run waits, and how to end `ahead`."""
    state = f"{ahead['state']}, step {ahead['step']} of {ahead['max_num_steps']}"
    reason = f": {ahead['message']}" if ahead["message"] else ""
    return f"{run_id} waits for {ahead['run_id']} ({state}{reason}); `paceline cancel {ahead['run_id']}` ends that run"


def _summary(facts: render.Facts) -> dict[str, Any]:
    path = Path(facts["directory"]) / "summary.json"
    try:
        summary: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return summary

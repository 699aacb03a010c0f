"""Progress of a run on the screen: one line for each event, and on a terminal a progress bar below."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.client import Client, Event
from services.cli import render
from services.common.options import print_json

if TYPE_CHECKING:
    from services.cli.offline import RecordedRuns


def follow(client: Client | RecordedRuns, run_id: str, *, after: int = 0, as_json: bool = False) -> None:
    """Print a run's events until it has ended. Exits with status 1 unless it succeeded. Raises NotFound, Unavailable.

    Of a directory's records it prints what is there, also of a run that has not ended.
    """
    total_steps = client.get(run_id).max_num_steps
    evaluations: list[dict[str, Any]] = []
    with _screen(run_id, total_steps, as_json) as show:
        for event in client.watch(run_id, after):
            if event.kind == "evaluation":
                evaluations.append(event.content)
            show(event)
    facts = render.run_facts(client.get(run_id))
    if not as_json:
        click.echo(render.outcome(facts, evaluations, _summary(facts)))
    if facts["state"] != "succeeded":
        raise click.exceptions.Exit(1)


@contextlib.contextmanager
def _screen(run_id: str, total_steps: int, as_json: bool) -> Iterator[Callable[[Event], None]]:
    if as_json:
        yield lambda event: print_json(
            {"run_id": run_id, "sequence": event.sequence, "kind": event.kind, "content": event.content}
        )
    elif not sys.stdout.isatty():
        yield lambda event: click.echo(render.event_line(event.kind, event.content))
    else:
        from rich.text import Text

        with _progress() as progress:
            task = progress.add_task(run_id, total=total_steps)

            def show(event: Event) -> None:
                line = render.event_line(event.kind, event.content)
                progress.console.print(Text(line, style=render.STYLES.get(event.kind, "")))
                if event.kind == "step":
                    progress.update(task, completed=event.content["step"] + 1)

            yield show


def _progress() -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    )


def _summary(facts: render.Facts) -> dict[str, Any]:
    """Return the run's summary.json if its directory is on this machine."""
    path = Path(facts["directory"]) / "summary.json"
    try:
        summary: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return summary

"""`paceline metrics RUN`: the metrics of a run from its directory, as a table, CSV or JSON. It needs no coordinator."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click

from paceline.client import Event
from paceline.errors import NotFound
from paceline.spec.explaining.nearest import nearest
from services.cli import render
from services.cli.recorded.offline import RecordedRuns
from services.cli.recorded.records import opened_ledger
from services.common.options import directory_option, find_run, json_option, print_json

KINDS = ("step", "evaluation")
Row = dict[str, Any]


@click.command()
@click.argument("run")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--kind", type=click.Choice(KINDS), default="step", show_default=True, help="Steps or evaluations."
)
@click.option("--csv", "as_csv", is_flag=True, help="Write every step as CSV, with a header.")
@directory_option
@json_option
def metrics(
    run: str, names: tuple[str, ...], kind: str, as_csv: bool, directory: Path, as_json: bool
) -> None:
    """Show the last value of every metric of RUN (its id or its folder), or of those of the NAMEs (reward, 'age/*'), with
    its range over the run.

    With --csv or --json every step is a row; the column `step` is the number of the step, or the version evaluated.
    """
    path, run_id = find_run(run, directory)
    with opened_ledger(path) as opened:
        rows = metric_rows(RecordedRuns(opened).watch(run_id), kind)
    check_names(names, _columns(rows), run_id)
    rows = selected(rows, names)
    if as_json:
        for row in rows:
            print_json(row)
    elif as_csv:
        _write_csv(rows)
    else:
        render.print_table(
            ("metric", "last", "least", "greatest", "steps"),
            _summary(rows),
            empty=f"{run_id} has no {kind} yet",
        )


def metric_rows(events: Iterable[Event], kind: str) -> list[Row]:
    """Return a row for each step (or evaluation): `step` and the metrics."""
    return [
        {"step": event.content.get("step")}
        | {name: value for name, value in event.content.items() if isinstance(value, int | float | None)}
        for event in events
        if event.kind == kind
    ]


def selected(rows: Sequence[Row], patterns: Sequence[str]) -> list[Row]:
    """Return the rows with `step` and the metrics whose name fits one of the patterns; with all if there is no pattern."""
    return [
        {
            name: value
            for name, value in row.items()
            if name == "step" or not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
        }
        for row in rows
    ]


def check_names(patterns: Sequence[str], names: Sequence[str], run_id: str) -> None:
    """Raises NotFound for a pattern that no metric fits, with the nearest name. A run without steps has none yet."""
    for pattern in patterns if names else ():
        if not any(fnmatchcase(name, pattern) for name in names):
            close = nearest(pattern, names)
            guess = f"did you mean {close[0]!r}" if close else f"`paceline metrics {run_id}` lists them"
            raise NotFound(f"{run_id} has no metric {pattern!r}; {guess}{'?' if close else ''}")


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _write_csv(rows: Sequence[Row]) -> None:
    writer = csv.DictWriter(sys.stdout, _columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _summary(rows: Sequence[Row]) -> list[list[str]]:
    """Return a line of the table for each metric, by name."""
    lines = []
    for name in sorted(set(_columns(rows)) - {"step"}):
        values = [row[name] for row in rows if row.get(name) is not None]
        numbers = (
            [f"{value:.6g}" for value in (values[-1], min(values), max(values))] if values else ["-"] * 3
        )
        lines.append([name, *numbers, str(len(values))])
    return lines

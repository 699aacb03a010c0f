"""`paceline metrics RUN`: the metrics of a run from its directory, as a table, CSV or JSON. It needs no coordinator."""

from __future__ import annotations

import csv
import fnmatch
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from paceline.client import Event
from services.cli import render
from services.cli.recorded.offline import RecordedRuns
from services.cli.recorded.records import opened_ledger
from services.common.options import directory_option, find_run, json_option, print_json

KINDS = ("step", "evaluation")
Row = dict[str, Any]


@click.command()
@click.argument("run")
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="PATTERN",
    help="Only metrics of this name, such as loss or 'reward/*'; may be given several times.",
)
@click.option(
    "--kind", type=click.Choice(KINDS), default="step", show_default=True, help="Steps or evaluations."
)
@click.option("--csv", "as_csv", is_flag=True, help="Write every step as CSV, with a header.")
@directory_option
@json_option
def metrics(
    run: str, names: tuple[str, ...], kind: str, as_csv: bool, directory: Path, as_json: bool
) -> None:
    """Show the last value of every metric of RUN (its id or its folder), with its range over the run.

    With --csv or --json every step is a row; the column `step` is the number of the step, or the version evaluated.
    """
    path, run_id = find_run(run, directory)
    with opened_ledger(path) as opened:
        rows = metric_rows(RecordedRuns(opened).watch(run_id), kind, names)
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


def metric_rows(events: Iterable[Event], kind: str, names: Sequence[str] = ()) -> list[Row]:
    """Return a row for each step (or evaluation): `step` and the metrics whose name fits one of the patterns."""
    rows = []
    for event in events:
        if event.kind == kind:
            kept = {
                name: value
                for name, value in event.content.items()
                if isinstance(value, int | float | None)
                and (not names or any(fnmatch.fnmatchcase(name, pattern) for pattern in names))
            }
            rows.append({"step": event.content.get("step")} | kept)
    return rows


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

"""`paceline metrics RUN`: the metrics of a run as a table, CSV, Parquet or JSON, from a ledger or a coordinator."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click

from paceline.errors import NotFound, counted
from paceline.records import RecordedEvent
from paceline.services.cli import render
from paceline.services.cli.recorded.source import records_of_run, source_options
from paceline.services.cli.render import FILE
from paceline.services.common.options import json_option, print_json
from paceline.services.common.reporting.metric_table import PARTS, entries_of
from paceline.spec.faults import nearest

KINDS = ("step", "evaluation")
TIME = "time"
"""Name of the metric with the wall-clock time of a step."""
Row = dict[str, Any]


@click.command()
@click.argument("run", required=False)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--kind", type=click.Choice(KINDS), default="step", show_default=True, help="Metrics of steps or of evaluations."
)
@click.option("--csv", "as_csv", is_flag=True, help="Write every step as CSV, with a header.")
@click.option("--parquet", type=FILE, help="Write every step to this Parquet file.")
@click.option("--explain", metavar="NAME", help="Only explain a metric, or all metrics that match a pattern.")
@source_options
@json_option
def metrics(
    run: str | None,
    names: tuple[str, ...],
    kind: str,
    as_csv: bool,
    parquet: Path | None,
    explain: str | None,
    directory: Path,
    coordinator: str | None,
    as_json: bool,
) -> None:
    """Show the last value and the range of every metric of RUN (its id or its folder), or of the metrics that match
    NAMES (reward, 'age/*').

    With --csv, --parquet or --json every step is a row; the column `step` is the number of the step, or the evaluated
    version.
    """
    if explain is not None:
        if run is not None or as_csv or parquet is not None:
            raise click.UsageError("--explain takes no RUN, --csv or --parquet")
        _explain(explain, as_json)
        return
    if run is None:
        raise click.UsageError("name a RUN, or a metric with --explain")
    with records_of_run(run, directory, coordinator) as (source, run_id):
        rows = metric_rows(source.records.events(run_id, kinds=[kind]), kind)
    check_names(names, _columns(rows), run_id)
    rows = selected(rows, names)
    if parquet is not None:
        _write_parquet(rows, parquet)
        click.echo(f"{parquet}: {counted(len(rows), 'row')} of {run_id}")
    elif as_json:
        for row in rows:
            print_json(row)
    elif as_csv:
        _write_csv(rows)
    else:
        render.print_table(
            ("metric", "last", "least", "greatest", "steps"), _summary(rows), empty=f"{run_id} has no {kind} yet"
        )


def _explain(name: str, as_json: bool) -> None:
    """Print the entries of the table of metrics that fit a name. Raises NotFound."""
    found = entries_of(name)
    if not found:
        close = nearest(name, [metric.name for part in PARTS for metric in part.metrics])
        raise NotFound(
            f"no metric {name!r}; " + (f"did you mean {close[0]!r}?" if close else "--explain '*' lists all metrics")
        )
    for part, metric in found:
        if as_json:
            print_json({"kind": part.kind} | metric._asdict())
            continue
        unit = f", {metric.unit}" if metric.unit else ""
        click.echo(f"{metric.name} ({part.title}{unit})\n    {metric.meaning}")
        if metric.healthy:
            click.echo(f"    healthy: {metric.healthy}")


def metric_rows(events: Iterable[RecordedEvent], kind: str) -> list[Row]:
    """Return a row for each step (or evaluation): `step` and the metrics."""
    return [
        {"step": event.content.get("step")}
        | {name: value for name, value in event.content.items() if isinstance(value, int | float | None)}
        for event in events
        if event.kind == kind
    ]


def selected(rows: Sequence[Row], patterns: Sequence[str]) -> list[Row]:
    """Return the rows with `step` and the metrics that match one of the patterns; all metrics without patterns."""
    return [
        {
            name: value
            for name, value in row.items()
            if name == "step" or not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
        }
        for row in rows
    ]


def check_names(patterns: Sequence[str], names: Sequence[str], run_id: str) -> None:
    """Raise NotFound, with the nearest name, for a pattern that matches no metric, unless the run has no steps yet."""
    for pattern in patterns if names else ():
        if not any(fnmatchcase(name, pattern) for name in names):
            close = nearest(pattern, names)
            guess = f"did you mean {close[0]!r}" if close else f"`paceline metrics {run_id}` lists its metrics"
            raise NotFound(f"{run_id} has no metric {pattern!r}; {guess}{'?' if close else ''}")


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _write_csv(rows: Sequence[Row]) -> None:
    writer = csv.DictWriter(sys.stdout, _columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _write_parquet(rows: Sequence[Row], path: Path) -> None:
    """Write a column of doubles for each metric, atomically. Raises NotFound if the file's folder is missing."""
    from paceline.data.table_rows import need_table_packages

    need_table_packages("a Parquet file")
    import pyarrow as pa

    types = {name: pa.int64() if name == "step" else pa.float64() for name in _columns(rows) or ["step"]}
    write_parquet({name: pa.array([row.get(name) for row in rows], types[name]) for name in types}, path)


def write_parquet(columns: dict[str, Any], path: Path) -> None:
    """Write a table atomically. Raises NotFound if the file's folder is missing."""
    import pyarrow as pa
    import pyarrow.parquet

    from paceline.files.whole_file import written_whole

    if not path.parent.is_dir():
        raise NotFound(f"no folder {path.parent}; create it first")
    with written_whole(path) as partial:
        pyarrow.parquet.write_table(pa.table(columns), partial, compression="zstd")


def _summary(rows: Sequence[Row]) -> list[list[str]]:
    lines = []
    for name in sorted(set(_columns(rows)) - {"step", TIME}):
        values = [row[name] for row in rows if row.get(name) is not None]
        numbers = [f"{value:.6g}" for value in (values[-1], min(values), max(values))] if values else ["-"] * 3
        lines.append([name, *numbers, str(len(values))])
    return lines

"""`paceline plot RUN...`: an HTML page with the curves of runs. It needs no coordinator and no network."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.errors import NotFound
from services.cli import render
from services.cli.recorded.metrics import metric_rows
from services.cli.recorded.offline import RecordedRuns
from services.cli.recorded.opening import opened_ledger
from services.cli.recorded.report_page import RunCurves, report_page
from services.common.options import directory_option, find_run, json_option, print_json

REPORT_NAME = "report.html"


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"File to write; default {REPORT_NAME} in the first run's folder.",
)
@directory_option
@json_option
def plot(runs: tuple[str, ...], out: Path | None, directory: Path, as_json: bool) -> None:
    """Write an HTML page with a curve for each metric of RUN (its id or its folder); several runs are compared.

    The page is one file that every browser shows. docs/metrics.md explains the metrics.
    """
    from paceline.files.whole_file import write_whole

    curves, folder = [], None
    for run in runs:
        path, run_id = find_run(run, directory)
        with opened_ledger(path) as opened:
            source = RecordedRuns(opened)
            facts = render.run_facts(source.get(run_id))
            events = list(source.watch(run_id))
        folder = folder or Path(facts["directory"])
        rows = (metric_rows(events, kind) for kind in ("step", "evaluation"))
        curves.append(RunCurves(run_id, facts["state"], *rows))
    assert folder is not None
    destination = out or folder / REPORT_NAME
    if not destination.parent.is_dir():
        raise NotFound(f"no folder {destination.parent}; make it first, or name another file with --out")
    write_whole(destination, report_page(curves))
    if as_json:
        print_json({"path": str(destination), "runs": [curve.run_id for curve in curves]})
    else:
        click.echo(f"{destination}: the curves of {', '.join(curve.run_id for curve in curves)}")

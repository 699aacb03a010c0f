"""`paceline plot RUN... [METRIC...]`: the curves of runs as one HTML page. It needs no coordinator, and takes one."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.apps.reports.report_page import RunCurves, curves_page
from paceline.errors import InvalidInput, NotFound
from paceline.services.cli import render
from paceline.services.cli.recorded.metrics import check_names, metric_rows, selected
from paceline.services.cli.recorded.source import Source, records_of_run, run_ids, source_options
from paceline.services.common.options import find_run, json_option, print_json

REPORT_NAME = "report.html"


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN... [METRIC]...")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"File to write; default {REPORT_NAME} in the first run's folder.",
)
@source_options
@json_option
def plot(
    runs: tuple[str, ...], out: Path | None, directory: Path, coordinator: str | None, as_json: bool
) -> None:
    """Write an HTML page with a curve for each METRIC (reward, 'age/*'; default all) of RUN (its id or its folder); several
    runs are compared.

    The page is one file that needs no network. docs/metrics.md explains the metrics.
    """
    from paceline.files.whole_file import write_whole

    names, metrics = _divided(runs, directory, coordinator)
    curves, folder = [], None
    for run in names:
        with records_of_run(run, directory, coordinator) as (source, run_id):
            facts = render.run_facts(source.get(run_id))
            curves.append(curves_of(source, run_id, facts["state"]))
        folder = folder or (Path.cwd() if coordinator else Path(facts["directory"]))
    assert folder is not None
    destination = out or folder / REPORT_NAME
    check_page_file(destination)
    known = [name for curve in curves for row in (*curve.steps, *curve.evaluations) for name in row]
    check_names(metrics, list(dict.fromkeys(known)), curves[0].run_id)
    shown = [
        curve._replace(steps=selected(curve.steps, metrics), evaluations=selected(curve.evaluations, metrics))
        for curve in curves
    ]
    write_whole(destination, curves_page(shown))
    if as_json:
        print_json({"path": str(destination), "runs": [curve.run_id for curve in curves]})
    else:
        click.echo(f"{destination}: the curves of {', '.join(curve.run_id for curve in curves)}")


def check_page_file(path: Path) -> None:
    """Raises InvalidInput for a file that is named as a picture, NotFound without its folder."""
    if path.suffix in (".svg", ".png"):
        raise InvalidInput(f"{path} would be an HTML page; name a file that ends in .html with --out")
    if not path.parent.is_dir():
        raise NotFound(f"no folder {path.parent}; make it first, or name another file with --out")


def curves_of(source: Source, run_id: str, state: str) -> RunCurves:
    """Return the metrics of a run."""
    events = list(source.records.events(run_id, kinds=["step", "evaluation"]))
    return RunCurves(run_id, state, *(metric_rows(events, kind) for kind in ("step", "evaluation")))


def _divided(words: tuple[str, ...], directory: Path, coordinator: str | None) -> tuple[list[str], list[str]]:
    """Return the runs and the metrics among the words; the first word is a run."""
    with records_of_run(words[0], directory, coordinator) as (source, _):
        known = set(run_ids(source))
    runs = [
        word for word in words if word is words[0] or word in known or find_run(word, directory)[1] != word
    ]
    return runs, [word for word in words if word not in runs]

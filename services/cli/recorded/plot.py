"""`paceline plot RUN... [METRIC...]`: the curves of runs as an HTML page, or those of some metrics as SVG or PNG. It needs no
coordinator, and takes one."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.errors import InvalidInput, NotFound
from services.cli import render
from services.cli.recorded import curve_file
from services.cli.recorded.metrics import check_names, metric_rows
from services.cli.recorded.report_page import RunCurves, report_page
from services.cli.recorded.source import Source, records_of_run, run_ids, source_options
from services.common.options import find_run, json_option, print_json

REPORT_NAME = "report.html"


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN... [METRIC]...")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"File to write: .html, .svg or .png; default {REPORT_NAME} in the first run's folder.",
)
@source_options
@json_option
def plot(
    runs: tuple[str, ...], out: Path | None, directory: Path, coordinator: str | None, as_json: bool
) -> None:
    """Write an HTML page with a curve for each metric of RUN (its id or its folder); several runs are compared.

    With -o FILE.svg or FILE.png the file has a chart for each METRIC (reward, 'age/*'); default reward. The page is one file that
    every browser shows. docs/metrics.md explains the metrics.
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
    if not destination.parent.is_dir():
        raise NotFound(f"no folder {destination.parent}; make it first, or name another file with --out")
    if destination.suffix in curve_file.FORMATS:
        known = list(dict.fromkeys(name for curve in curves for row in curve.steps for name in row))
        check_names(metrics, known, curves[0].run_id)
        charts = curve_file.charts_of(curves, metrics or ["reward"])
        if not charts:
            raise NotFound(f"{curves[0].run_id} has no value of {', '.join(metrics or ['reward'])} yet")
        draw = curve_file.as_png if destination.suffix == ".png" else curve_file.as_svg
        write_whole(destination, draw(charts, [curve.run_id for curve in curves]))
    elif metrics:
        raise InvalidInput(
            f"{metrics[0]!r} is no run; a page has all metrics. With metrics name a file: -o curve.svg or curve.png"
        )
    else:
        write_whole(destination, report_page(curves))
    if as_json:
        print_json({"path": str(destination), "runs": [curve.run_id for curve in curves]})
    else:
        click.echo(f"{destination}: the curves of {', '.join(curve.run_id for curve in curves)}")


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

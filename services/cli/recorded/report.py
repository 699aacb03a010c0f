"""`paceline report RUN`: one self-contained HTML file about a run, to send to a colleague. It needs no coordinator, and takes one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from paceline.errors import NotFound
from services.cli import render
from services.cli.recorded.plot import REPORT_NAME, curves_of
from services.cli.recorded.report_page import curve_sections, page
from services.cli.recorded.report_sections import STYLE, Report, head, sections
from services.cli.recorded.source import Source, records_of_run, source_options
from services.common.options import json_option, print_json

SHOWN = 6
"""Best and worst completions that are shown of the last step."""

WARNINGS = 200


@click.command()
@click.argument("run")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"File to write; default {REPORT_NAME} in the run's folder, or here with --coordinator.",
)
@click.option("--verify", "verifies", is_flag=True, help="Compare all records first, and say what was found.")
@source_options
@json_option
def report(
    run: str, out: Path | None, verifies: bool, directory: Path, coordinator: str | None, as_json: bool
) -> None:
    """Write one HTML file about RUN (its id or its folder): outcome, curves, samples, books, checkpoints and spec.

    The file needs no network and runs no script: what models wrote is text in it.
    """
    from paceline.files.whole_file import write_whole

    with records_of_run(run, directory, coordinator) as (source, run_id):
        facts = render.run_facts(source.get(run_id))
        destination = out or (Path.cwd() if coordinator else Path(facts["directory"])) / REPORT_NAME
        if not destination.parent.is_dir():
            raise NotFound(f"no folder {destination.parent}; make it first, or name another file with --out")
        content = _report(source, run_id, facts, verifies=verifies)
        curves = curve_sections([curves_of(source, run_id, facts["state"])])
    write_whole(destination, page(run_id, head(content) + curves + sections(content), STYLE))
    if as_json:
        print_json({"path": str(destination), "run_id": run_id})
    else:
        click.echo(f"{destination}: {run_id}")


def _report(source: Source, run_id: str, facts: dict[str, Any], *, verifies: bool) -> Report:
    records = source.records
    warnings = [event.content.get("message", "") for event in records.events(run_id, kinds=["warning"])]
    return Report(
        facts=facts,
        books=records.books(run_id),
        spec=records.spec(run_id),
        spec_yaml=records.spec_yaml(run_id),
        checkpoints=records.checkpoints(run_id),
        warnings=warnings[-WARNINGS:],
        samples=_samples(source, run_id),
        verified=records.verify(run_id) if verifies else None,
    )


def _samples(source: Source, run_id: str) -> list[dict[str, Any]]:
    """Return the best and the worst completions of the newest trained step, each as a group of its own; none for a run without
    samples."""
    try:
        step = source.records.newest_trained_step(run_id)
        groups = list(source.records.sample_groups(run_id, full=True, from_step=step, to_step=step))
    except NotFound:
        return []
    found = [
        json.loads(group.json) | {"completion": completion}
        for group in groups
        if group.json
        for completion in json.loads(group.json)["completions"]
        if completion["reward"] is not None
    ]
    found.sort(key=lambda each: -each["completion"]["reward"])
    return found if len(found) <= 2 * SHOWN else found[:SHOWN] + found[-SHOWN:]

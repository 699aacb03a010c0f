"""`paceline sweep SPEC SWEEP.yaml`: search over keys of a spec, by runs of a coordinator or of services that it starts here."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from paceline.apps.sweeps import pictures
from paceline.apps.sweeps.study import SweepStudy
from paceline.apps.sweeps.sweep_file import check_sweep, load_sweep, overrides_of
from paceline.apps.sweeps.trials import Trials
from paceline.client import Client
from paceline.services.common.insecure import check_coordinator, insecure_option
from paceline.services.common.options import directory_option, json_option, print_json, token_file_option
from paceline.services.common.reporting.visible_text import visible
from paceline.services.local.folder_lock import FolderLock
from paceline.spec import RunSpec

FOLDER, LOCK, REPORT = "sweeps", "sweep.lock", "report.html"


@click.command()
@click.argument("spec", type=click.Path())
@click.argument("sweep", type=click.Path(), metavar="SWEEP.yaml")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option(
    "--coordinator",
    metavar="HOST:PORT",
    callback=check_coordinator,
    help="Queue the trials there instead of starting services here.",
)
@click.option(
    "--report",
    "report_file",
    type=click.Path(path_type=Path),
    help="Write the pictures of the trials so far there, and end.",
)
@insecure_option
@directory_option
@token_file_option
@json_option
def sweep(
    spec: str,
    sweep: str,
    overrides: tuple[str, ...],
    coordinator: str | None,
    report_file: Path | None,
    directory: Path,
    as_json: bool,
) -> None:
    """Search over keys of SPEC for the best value of a metric, one run after the other.

    SWEEP.yaml names the keys, their bounds and the metric. The study is in the directory's sweeps/; the same command goes on
    with it. Ctrl-C ends it, and a run under way goes on with the next call.
    """
    wanted = load_sweep(sweep)
    base = check_sweep(wanted, spec, overrides)
    folder = directory / FOLDER / wanted.name

    def say(line: str) -> None:
        click.echo(visible(line), err=as_json)

    if report_file is not None:
        study = SweepStudy(folder, wanted, read_only=True)
        _write_report(study, report_file)
    else:
        report_file = folder / REPORT
        with contextlib.ExitStack() as stack:
            lock = FolderLock(folder / LOCK, "`paceline sweep`")
            lock.take()
            stack.callback(lock.release)
            study = SweepStudy(folder, wanted)
            client = _client(stack, coordinator, base, directory, say)
            stack.callback(_write_report, study, report_file)
            Trials(study, client, spec, overrides, say).run()
    _conclude(study, spec, overrides, report_file, as_json)


def _client(
    stack: contextlib.ExitStack,
    coordinator: str | None,
    spec: RunSpec,
    directory: Path,
    say: Callable[[str], None],
) -> Client:
    """Return a client of the coordinator that was named, or of services that end with `stack`."""
    if coordinator is not None:
        return stack.enter_context(Client(coordinator, reconnect_s=math.inf))
    from paceline.services.cli.running.up import ends_with_signals, placed
    from paceline.services.common.gpus import visible_gpus
    from paceline.services.local.cluster import LocalCluster
    from paceline.services.local.page_link import start_page

    gpus = visible_gpus()
    _, sizes = placed(spec, [spec], len(gpus), say)
    stack.enter_context(ends_with_signals())
    cluster = stack.enter_context(LocalCluster(directory, sizes, say=say, gpus=gpus))
    client = stack.enter_context(Client(cluster.address, wait_s=math.inf, reconnect_s=math.inf))
    cluster.on_failure = client.close
    say(f"coordinator at {cluster.address}, ledger and logs in {cluster.directory}")
    start_page(cluster, "127.0.0.1", say)
    return client


def _write_report(study: SweepStudy, path: Path) -> None:
    trials = pictures.trials_of(study.study)
    best = study.best()
    shown = next((each for each in trials if best is not None and each.number == best.number), None)
    path.write_text(
        pictures.report(study.sweep, trials, pictures.importances(study.study), shown), encoding="utf-8"
    )


def _conclude(study: SweepStudy, spec: str, overrides: tuple[str, ...], report: Path, as_json: bool) -> None:
    """Print the best trial, and the command that trains with its values; exit with 1 if there is none."""
    best = study.best()
    facts: dict[str, Any] = {
        "name": study.sweep.name,
        "trials": study.num_ended(),
        "report": str(report),
        "best": None,
    }
    if best is not None:
        facts["best"] = {"trial": best.number, "run_id": best.user_attrs.get("run_id"), "value": best.value}
        facts["best"]["values"] = dict(best.params)
    if as_json:
        print_json(facts)
    elif best is None:
        click.echo(
            f"none of {study.num_ended()} trials ran to its end; {report} has their messages", err=True
        )
    else:
        click.echo(
            f"best of {study.num_ended()} trials: {study.sweep.metric} {best.value:.4g}, trial {best.number}\n"
            f"paceline up {' '.join([spec, *overrides, *overrides_of(dict(best.params))])}\n"
            f"pictures are in {report}"
        )
    if best is None:
        raise click.exceptions.Exit(1)

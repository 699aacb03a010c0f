"""`paceline sweep SPEC SWEEP.yaml`: search over keys of a spec, by runs on a coordinator or on services started here.

Promise: a trial has one run. The run's name is recorded before the run is submitted. A process that resumes the sweep
after a kill searches for this name, follows the run if it exists, and submits it otherwise. A pruned trial's run is
cancelled; a run that fails, or pauses because of a fault, makes its trial failed, and the sweep goes on.
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from paceline.apps.sweeps import pictures
from paceline.apps.sweeps.study import SweepStudy, Trial
from paceline.apps.sweeps.sweep_file import check_sweep, load_sweep, overrides_of
from paceline.client import Client, Event
from paceline.errors import Conflict, counted
from paceline.services.cli import render
from paceline.services.cli.render import PATH
from paceline.services.cli.running.watching import advice, in_front_of
from paceline.services.common.access.insecure import check_coordinator, insecure_option
from paceline.services.common.options import directory_option, json_option, print_json, token_file_option
from paceline.services.common.reporting.terminal import visible
from paceline.services.local.folder_lock import FolderLock
from paceline.spec import RunSpec
from paceline.spec.reading import load_spec

FOLDER, LOCK, REPORT = "sweeps", "sweep.lock", "report.html"


@click.command()
@click.argument("spec", type=click.Path())
@click.argument("sweep", type=click.Path(), metavar="SWEEP.yaml")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option(
    "--coordinator",
    metavar="HOST:PORT",
    callback=check_coordinator,
    help="Submit the trials to this coordinator instead of starting services here.",
)
@click.option(
    "--report", "report_file", type=PATH, help="Write the pictures of the trials so far to this file, and exit."
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

    SWEEP.yaml names the keys, their bounds and the metric. The study is in the directory's sweeps/; repeating the
    command resumes it. Ctrl-C ends it; the next call goes on with a run under way.
    """
    search = load_sweep(sweep)
    base = check_sweep(search, spec, overrides)
    folder = directory / FOLDER / search.name

    def say(line: str) -> None:
        click.echo(visible(line), err=as_json)

    if report_file is not None:
        study = SweepStudy(folder, search, read_only=True)
        _write_report(study, report_file)
    else:
        report_file = folder / REPORT
        with contextlib.ExitStack() as stack:
            lock = FolderLock(folder / LOCK, "`paceline sweep`")
            lock.take()
            stack.callback(lock.release)
            study = SweepStudy(folder, search)
            client = _client(stack, coordinator, base, directory, say)
            stack.callback(_write_report, study, report_file)
            Trials(study, client, spec, overrides, say).run()
    _conclude(study, spec, overrides, report_file, as_json)


def _client(
    stack: contextlib.ExitStack, coordinator: str | None, spec: RunSpec, directory: Path, say: Callable[[str], None]
) -> Client:
    if coordinator is not None:
        return stack.enter_context(Client(coordinator, reconnect_s=math.inf))
    from paceline.services.cli.running.up import ends_with_signals, placed
    from paceline.services.common.gpus import visible_gpus
    from paceline.services.local.cluster import LocalCluster, start_page

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
    path.write_text(pictures.report(study.sweep, trials, pictures.importances(study.study), shown), encoding="utf-8")


def _conclude(study: SweepStudy, spec: str, overrides: tuple[str, ...], report: Path, as_json: bool) -> None:
    best = study.best()
    facts: dict[str, Any] = {"name": study.sweep.name, "trials": study.num_ended(), "report": str(report), "best": None}
    if best is not None:
        facts["best"] = {"trial": best.number, "run_id": best.user_attrs.get("run_id"), "value": best.value}
        facts["best"]["values"] = dict(best.params)
    if as_json:
        print_json(facts)
    elif best is None:
        click.echo(
            f"none of {counted(study.num_ended(), 'trial')} ran to its end; {report} has their messages", err=True
        )
    else:
        click.echo(
            f"best of {counted(study.num_ended(), 'trial')}: {study.sweep.metric} {best.value:.4g}, trial {best.number}\n"
            f"paceline up {' '.join([spec, *overrides, *overrides_of(dict(best.params))])}\n"
            f"pictures are in {report}"
        )
    if best is None:
        raise click.exceptions.Exit(1)


class Trials:
    """Runs the trials of a study until the sweep's number of trials is reached."""

    def __init__(
        self, study: SweepStudy, coordinator: Client, spec: str, overrides: tuple[str, ...], say: Callable[[str], None]
    ):
        """`spec` is the file that the trials change; `say` receives a line for each start and outcome."""
        self._study, self._coordinator = study, coordinator
        self._spec, self._overrides, self._say = spec, overrides, say
        self._sweep = study.sweep

    def run(self) -> None:
        """Resume open trials, then begin others. Raises Unavailable if the coordinator stays unreachable."""
        for trial in self._study.open_trials():
            self._run(trial)
        while self._study.num_ended() < self._sweep.trials:
            self._run(self._study.ask())

    def _run(self, trial: Trial) -> None:
        values = ", ".join(f"{key}={pictures.short(value)}" for key, value in trial.values.items())
        run_id = trial.run_id or self._found(trial)
        if run_id:
            self._say(f"trial {trial.number} goes on as {run_id}: {values}")
        else:
            name = self._study.run_name(trial.number)
            spec = load_spec(self._spec, (*self._overrides, *overrides_of(trial.values), f"name={name}"))
            run_id = str(self._coordinator.submit(spec).run_id)
            self._say(f"trial {trial.number} is {run_id}: {values}")
        trial.set_run(run_id)
        if (ahead := in_front_of(self._coordinator, run_id)) is not None:
            self._say(advice(run_id, ahead))
        self._say(f"trial {trial.number}: {self._follow(trial, run_id)}")

    def _found(self, trial: Trial) -> str:
        """Return the run of a trial whose process was killed between submitting the run and recording it."""
        named = re.compile(re.escape(self._study.run_name(trial.number)) + r"-\d+")  # an id is the name and a number
        return next((str(run.run_id) for run in self._coordinator.runs() if named.fullmatch(run.run_id)), "")

    def _follow(self, trial: Trial, run_id: str) -> str:
        measured: list[float] = []
        for event in self._coordinator.watch(run_id):
            if (value := self._value(event)) is not None:
                measured.append(value)
                if trial.report(int(event.content.get("step", len(measured))), value):
                    self._cancel(run_id)
                    trial.prune()
                    return f"pruned at step {event.content.get('step')} with {self._sweep.metric} {value:.4g}"
            if event.kind == "state" and event.content.get("state") == "paused" and self._is_stuck(run_id, event):
                message = str(event.content.get("message", ""))
                self._cancel(run_id)
                trial.fail(message)
                return f"failed, because its run paused: {message}"
        facts = render.run_facts(self._coordinator.get(run_id))
        if facts["state"] != "succeeded":
            trial.fail(facts["message"] or facts["state"])
            return f"failed: its run is {facts['state']}{': ' if facts['message'] else ''}{facts['message']}"
        if not measured:
            trial.fail(f"no {self._sweep.metric!r} in any {self._sweep.of}")
            return f"failed: no event of kind {self._sweep.of!r} had a number {self._sweep.metric!r}"
        value = (
            measured[-1] if self._sweep.of == "evaluation" else statistics.fmean(measured[-self._sweep.last_steps :])
        )
        trial.complete(value)
        return f"{self._sweep.metric} {value:.4g}"

    def _value(self, event: Event) -> float | None:
        value = event.content.get(self._sweep.metric) if event.kind == self._sweep.of else None
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def _is_stuck(self, run_id: str, event: Event) -> bool:
        """Return whether a fault paused a run; a person's pause (no message) and a retried pause do not count."""
        if event.content.get("retried"):
            return False
        facts = render.run_facts(self._coordinator.get(run_id))
        return facts["state"] == "paused" and bool(facts["message"])

    def _cancel(self, run_id: str) -> None:
        with contextlib.suppress(Conflict):  # it has ended meanwhile
            self._coordinator.cancel(run_id)

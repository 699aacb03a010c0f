"""Commands about runs: submit, runs, watch, cancel, pause, resume, drop, checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.calls.connection import checked_address, is_loopback
from paceline.client import Client
from paceline.services.cli import render
from paceline.services.cli.recorded.source import DEFAULT_DIRECTORY, runs_of
from paceline.services.cli.running.progress import Shown, shown_options
from paceline.services.cli.running.watching import follow, wait_for
from paceline.services.common.options import (
    coordinator_option,
    find_run,
    json_option,
    print_json,
    recorded_option,
)
from paceline.spec import RunSpec


@click.command()
@click.argument("spec", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--watch", "and_watch", is_flag=True, help="Follow the run until it ends.")
@click.option(
    "--wait", "and_wait", is_flag=True, help="Return when it has ended or is paused, with an exit status."
)
@coordinator_option
@shown_options
def submit(
    spec: str, overrides: tuple[str, ...], and_watch: bool, and_wait: bool, coordinator: str, shown: Shown
) -> None:
    """Queue a run from a YAML spec, with overrides such as grpo.max_num_steps=50.

    Exit status with --wait: 0 succeeded, 1 failed, 3 cancelled, 4 paused, with the reason on stderr; 1 also when the
    coordinator is gone for good. Ctrl-C leaves the run as it is.
    """
    from paceline.spec.reading import load_spec

    loaded = load_spec(spec, overrides)
    if warning := _shortage_here(loaded, coordinator):
        click.echo(f"warning: {warning}", err=True)
    with Client(coordinator) as client:
        facts = render.run_facts(client.submit(loaded))
        if shown.as_json:
            print_json(facts)
        else:
            click.echo(f"run {facts['run_id']} is {facts['state']}: {facts['directory']}")
            if not and_watch:  # otherwise the warnings are among the run's events
                for warning in facts["warnings"]:
                    click.echo(f"warning: {warning}", err=True)
        if and_wait and not and_watch:
            wait_for(client, facts["run_id"], shown)
        if and_watch:
            follow(client, facts["run_id"], shown=shown)


@click.command()
@coordinator_option
@recorded_option
@json_option
def runs(coordinator: str, directory: Path | None, as_json: bool) -> None:
    """List the runs of the coordinator, or of a directory, oldest first; as JSON lines with --json."""
    with runs_of(coordinator, directory) as source:
        facts = [render.run_facts(run) for run in source.runs()]
    if as_json:
        for run_facts in facts:
            print_json(run_facts)
    else:
        render.print_table(
            render.RUN_COLUMNS, [render.run_row(run_facts) for run_facts in facts], empty="no runs yet"
        )


@click.command()
@click.argument("run")
@click.option("--after", default=0, help="Show only events after this sequence number.")
@coordinator_option
@recorded_option
@shown_options
def watch(run: str, after: int, coordinator: str, directory: Path | None, shown: Shown) -> None:
    """Follow a run until it ends; exit status 1 if it does not succeed. JSON lines with --json.

    RUN is its id or its folder. Of a directory, or a folder, it shows what is on record.
    """
    if Path(run).is_dir() and directory is None:
        path, run = find_run(run, DEFAULT_DIRECTORY)
        directory = path.parent
    with runs_of(coordinator, directory) as source:
        follow(source, run, after=after, shown=shown)


@click.command()
@click.argument("run")
@coordinator_option
@json_option
def cancel(run: str, coordinator: str, as_json: bool) -> None:
    """End a run; its checkpoints stay."""
    with Client(coordinator) as client:
        _say(render.run_facts(client.cancel(run)), as_json)


@click.command()
@click.argument("run")
@coordinator_option
@json_option
def pause(run: str, coordinator: str, as_json: bool) -> None:
    """Pause a run: no further prompt is generated and no further step begins until `resume`."""
    with Client(coordinator) as client:
        _say(render.run_facts(client.pause(run)), as_json)


@click.command()
@click.argument("run")
@coordinator_option
@json_option
def resume(run: str, coordinator: str, as_json: bool) -> None:
    """Go on with a run that is paused; queue a run that has failed again."""
    with Client(coordinator) as client:
        _say(render.run_facts(client.resume(run)), as_json)


@click.command()
@click.argument("run")
@click.option("--timeout", "timeout_s", default=600.0, show_default=True, help="Seconds to wait for it.")
@coordinator_option
@json_option
def checkpoint(run: str, timeout_s: float, coordinator: str, as_json: bool) -> None:
    """Let the learner write a checkpoint after the step under way, and print its folder once it is complete."""
    with Client(coordinator) as client:
        path = client.checkpoint(run, timeout_s)
    if as_json:
        print_json({"run_id": run, "path": path})
    else:
        click.echo(path)


@click.command()
@click.argument("run")
@click.argument("groups", nargs=-1, required=True, type=click.IntRange(min=0), metavar="GROUP...")
@coordinator_option
@json_option
def drop(run: str, groups: tuple[int, ...], coordinator: str, as_json: bool) -> None:
    """Take groups out of the batch that a paused run is to train next; other groups complete the batch."""
    with Client(coordinator) as client:
        facts = render.run_facts(client.drop_groups(run, groups))
    if as_json:
        print_json(facts)
        return
    named = f"group{'s' if len(groups) > 1 else ''} {', '.join(map(str, groups))}"
    click.echo(f"dropped {named} of run {run}, which is {facts['state']}; `paceline resume {run}` goes on")


def _shortage_here(spec: RunSpec, coordinator: str) -> str:
    """Return a warning when this machine, where the coordinator and its workers are, has too little memory for the run."""
    from paceline.host.memory import available_bytes
    from paceline.models.memory_estimate import shortage

    host = checked_address(coordinator).rpartition(":")[0]
    return shortage(spec, available_bytes()) if is_loopback(host) else ""


def _say(facts: render.Facts, as_json: bool) -> None:
    if as_json:
        print_json(facts)
    else:
        click.echo(f"run {facts['run_id']} is {facts['state']}")

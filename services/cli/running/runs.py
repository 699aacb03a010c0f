"""Commands on runs, their pools (status) and workers (members, drain)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.calls.connection import checked_address, is_loopback
from paceline.client import Client
from paceline.errors import Conflict, InvalidInput, NotFound, PacelineError, counted
from paceline.files.names import LEDGER_NAME
from paceline.services.cli import render
from paceline.services.cli.recorded.source import DEFAULT_DIRECTORY, runs_of
from paceline.services.cli.running.progress import Shown, shown_options
from paceline.services.cli.running.watching import follow, wait_for
from paceline.services.common.options import (
    SECONDS,
    coordinator_option,
    find_run,
    json_option,
    print_json,
    recorded_option,
)
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection, RunSpec

if TYPE_CHECKING:
    from paceline.v1.status_pb2 import PoolStatus, StatusResponse


@click.command()
@click.argument("spec", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--watch", "and_watch", is_flag=True, help="Follow the run until it ends.")
@click.option(
    "--wait", "and_wait", is_flag=True, help="Wait until the run has ended or is paused; the exit status says which."
)
@coordinator_option
@shown_options
def submit(
    spec: str, overrides: tuple[str, ...], and_watch: bool, and_wait: bool, coordinator: str, shown: Shown
) -> None:
    """Queue a run from a YAML spec, with overrides such as grpo.max_num_steps=50.

    Exit status with --wait: 0 succeeded, 1 failed, 3 cancelled, 4 paused, with the reason on stderr; 1 also if the
    coordinator stays away for good. Ctrl-C does not affect the run.
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
    render.print_all(as_json, facts, render.RUN_COLUMNS, render.run_row, "no runs yet")
    for line in () if as_json else render.long_messages(facts):
        click.echo(line)


@click.command()
@click.argument("run")
@click.option("--after", default=0, help="Show only events after this sequence number.")
@coordinator_option
@recorded_option
@shown_options
def watch(run: str, after: int, coordinator: str, directory: Path | None, shown: Shown) -> None:
    """Follow a run until it ends; exit status 1 if it does not succeed. JSON lines with --json.

    RUN is its id or its folder. With a directory or a folder it shows the recorded events.
    """
    if Path(run).is_dir() and directory is None:
        path, run = find_run(run, DEFAULT_DIRECTORY)
        directory = path.parent
    with runs_of(coordinator, directory) as source:
        follow(source, run, after=after, shown=shown)


@click.command()
@click.argument("run")
@coordinator_option
@click.option(
    "--directory",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="End a run of this folder while no coordinator works in it. A coordinator is started for the call; it may also start "
    "the next run in the queue.",
)
@json_option
def cancel(run: str, coordinator: str, directory: Path | None, as_json: bool) -> None:
    """End a run; its checkpoints stay."""
    with _called(coordinator, directory) as client:
        _say(render.run_facts(client.cancel(run)), as_json)


@contextlib.contextmanager
def _called(coordinator: str, directory: Path | None) -> Iterator[Client]:
    """Open a client of the coordinator; with `directory`, of a coordinator that is started there until the end of the
    block."""
    if directory is None:
        with Client(coordinator) as client:
            yield client
        return
    if not (directory / LEDGER_NAME).is_file():
        raise NotFound(f"no ledger in {directory}; name the coordinator's --directory")
    cluster = LocalCluster(directory, ClusterSection(), gpus=())
    try:
        with Client(cluster.start_coordinator()) as client:
            yield client
    except Conflict as error:
        raise Conflict(f"{error}; leave out --directory to call the coordinator that works there") from None
    finally:
        cluster.stop()


@click.command()
@click.argument("run")
@coordinator_option
@json_option
def pause(run: str, coordinator: str, as_json: bool) -> None:
    """Pause a run: no further group is generated and no further step begins until `resume`. Meanwhile a waiting run
    gets the workers."""
    with Client(coordinator) as client:
        _say(render.run_facts(client.pause(run)), as_json)


@click.command()
@click.argument("run")
@coordinator_option
@json_option
def resume(run: str, coordinator: str, as_json: bool) -> None:
    """Continue a paused run. A failed run is queued again, and so is a paused run if another run uses the workers
    now."""
    with Client(coordinator) as client:
        _say(render.run_facts(client.resume(run)), as_json)


@click.command()
@click.argument("run")
@click.option(
    "--timeout", "timeout_s", type=SECONDS, default=600.0, show_default=True, help="Seconds to wait for the checkpoint."
)
@coordinator_option
@json_option
def checkpoint(run: str, timeout_s: float, coordinator: str, as_json: bool) -> None:
    """Let the learner write a checkpoint after its current step, and print the folder of the complete checkpoint."""
    with Client(coordinator) as client:
        path = client.checkpoint(run, timeout_s)
    render.answer(as_json, {"run_id": run, "path": path}, path)


@click.command()
@click.argument("run")
@click.argument("groups", nargs=-1, required=True, type=click.IntRange(min=0), metavar="GROUP...")
@coordinator_option
@json_option
def drop(run: str, groups: tuple[int, ...], coordinator: str, as_json: bool) -> None:
    """Drop groups from the batch that a paused run is to train next; other groups complete the batch."""
    with Client(coordinator) as client:
        facts = render.run_facts(client.drop_groups(run, groups))
    if as_json:
        print_json(facts)
        return
    named = f"group{'s' if len(groups) > 1 else ''} {', '.join(map(str, groups))}"
    click.echo(f"dropped {named} of run {run}, which is {facts['state']}; `paceline resume {run}` continues the run")


def _shortage_here(spec: RunSpec, coordinator: str) -> str:
    """Return a warning if coordinator and workers share this machine and its memory is too small; empty otherwise."""
    from paceline.host.resources import available_bytes
    from paceline.models.memory_estimate import shortage

    host = checked_address(coordinator).rpartition(":")[0]
    return shortage(spec, available_bytes()) if is_loopback(host) else ""


def _say(facts: render.Facts, as_json: bool) -> None:
    if as_json:
        print_json(facts)
    else:
        click.echo(f"run {facts['run_id']} is {facts['state']}")


COLUMNS = (
    *("pool", "ready", "starting", "wanted", "needed"),
    *("groups/s each", "groups/s asked", "room taken", "scaled"),
)
STATUS = (
    *("run_id", "state", "step", "max_num_steps", "queued_runs"),
    *("advice", "insecurity", "learner_wait_fraction"),
)
POOL = (
    *("name", "ready", "starting", "desired", "need", "rate", "demand", "occupied"),
    *("is_scaled", "cost_per_hour"),
)


@click.command()
@coordinator_option
@json_option
def status(coordinator: str, as_json: bool) -> None:
    """Show which pool limits the run that trains, by how much, what to change, and how much faster a step would be.

    `wanted` is the size for a scaler; `needed` is the size that keeps the learner busy, with a tenth to spare.
    """
    with Client(coordinator) as client:
        response = client.status()
    if as_json:
        print_json(status_facts(response))
        return
    if response.run_id:
        click.echo(
            f"{response.run_id} is {response.state}, step {response.step} of {response.max_num_steps}"
            + (f"; {response.queued_runs} more in the queue" if response.queued_runs else "")
        )
    click.echo(response.advice)
    if response.insecurity:
        click.echo(response.insecurity)
    if response.pools:
        render.print_table(COLUMNS, [_row(pool) for pool in response.pools], empty="")


def status_facts(response: StatusResponse) -> render.Facts:
    facts = {name: getattr(response, name) for name in STATUS}
    return facts | {"pools": [{name: getattr(pool, name) for name in POOL} for pool in response.pools]}


def _row(pool: PoolStatus) -> list[str]:
    unknown = "-"
    return [
        pool.name,
        str(pool.ready),
        str(pool.starting),
        str(pool.desired),
        f"{pool.need:.1f}" if pool.need else unknown,
        f"{pool.rate:.2f}" if pool.rate else unknown,
        f"{pool.demand:.2f}" if pool.demand else unknown,
        f"{pool.occupied:.0%}",
        "yes" if pool.is_scaled else "no",
    ]


LEAVING_S = 30.0
"""Seconds after a worker's grace in which the worker should leave: it returns unfinished work, or writes a checkpoint.
"""
POLL_S = 0.2


@click.command()
@coordinator_option
@json_option
def members(coordinator: str, as_json: bool) -> None:
    """List the workers that are members now; with --json as JSON lines."""
    with Client(coordinator) as client:
        facts = [render.member_facts(member) for member in client.members()]
    render.print_all(as_json, facts, render.MEMBER_COLUMNS, render.member_row, "no workers yet")


@click.command()
@click.argument("member")
@click.option(
    "--grace",
    "grace_s",
    type=SECONDS,
    default=60.0,
    show_default=True,
    help="Seconds in which the worker may finish its work.",
)
@coordinator_option
@json_option
def drain(member: str, grace_s: float, coordinator: str, as_json: bool) -> None:
    """Let a worker finish its work and leave, and wait until it has left; exit status 1 if it stays.

    MEMBER is the worker's id, or its first characters if no other id begins with them. The worker gets no new work;
    groups that are unfinished after --grace are returned with their tokens, and other workers continue them.
    """
    with Client(coordinator) as client:
        member_id = _member(client, member)
        held, started_s = client.drain(member_id, grace_s), time.monotonic()
        if not as_json:
            click.echo(f"{member_id} holds {counted(held, 'group')} and has {grace_s:g} s to finish")
        while any(one.member_id == member_id for one in client.members()):
            if time.monotonic() - started_s > grace_s + LEAVING_S:
                raise PacelineError(
                    f"{member_id} is still a member {LEAVING_S:g} s after its grace; end its process, so that other workers get its work"
                )
            time.sleep(POLL_S)
    seconds = time.monotonic() - started_s
    if as_json:
        print_json({"member_id": member_id, "held": held, "seconds": round(seconds, 3)})
    else:
        click.echo(f"{member_id} has left after {seconds:.1f} s")


def _member(client: Client, text: str) -> str:
    """Return the id of the member that `text` names. Raises NotFound, InvalidInput."""
    ids = [member.member_id for member in client.members()]
    found = [text] if text in ids else [member_id for member_id in ids if member_id.startswith(text)]
    if not found:
        members = f"the members are {', '.join(ids)}" if ids else "there are no members"
        raise NotFound(f"no member {text!r}; {members}")
    if len(found) > 1:
        raise InvalidInput(f"{text!r} is the beginning of several member ids: {', '.join(found)}; give more characters")
    return found[0]

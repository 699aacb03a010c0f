"""`paceline up`: all services on this host under one supervisor, and the progress of the run on the screen."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import click

from paceline.client import ENDED_STATES, Client
from paceline.errors import NotFound, PacelineError, SpecError
from paceline.files.names import LEDGER_NAME
from paceline.host.resources import available_bytes
from paceline.models.memory_estimate import shortage
from paceline.services.cli.running.progress import Shown, shown_options
from paceline.services.cli.running.watching import follow
from paceline.services.common.access.insecure import check_host, insecure_option
from paceline.services.common.gpus import divide, named_in, torch_is_for_cpus, visible_gpus
from paceline.services.common.options import (
    PORT,
    SECONDS,
    directory_option,
    functions_from_option,
    linux_only,
    store_option,
    token_file_option,
)
from paceline.services.common.user_code_options import user_code_options
from paceline.services.local.cluster import GRACE_S, USUAL_PORT, LocalCluster, free_port, start_page
from paceline.services.local.room import check_paths_are_here, imports_of, planned_here, sizes_for
from paceline.spec import ClusterSection, RunSpec
from paceline.user_code.left_over import adopt

MIN_FREE_MB = 512
INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""


SCALED_ROLES = ("rollout", "reward", "environment")


def _bounds(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Parse --bounds. Raises click.UsageError for anything but POOL=FEWEST:MOST."""
    bounds = {}
    for text in texts:
        match = re.fullmatch(r"(\w+)=(\d{1,5}):(\d{1,5})", text)
        if match is None or match[1] not in SCALED_ROLES or not max(1, int(match[2])) <= int(match[3]):
            raise click.UsageError(
                f"--bounds {text}: must be POOL=FEWEST:MOST, such as rollout=0:4, and POOL must be one of {', '.join(SCALED_ROLES)}"
            )
        bounds[match[1]] = (int(match[2]), int(match[3]))
    return bounds


no_page_option = click.option("--no-page", is_flag=True, help="Do not start the page that shows the runs in a browser.")


@click.command()
@click.argument("spec", required=False, type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@directory_option
@store_option
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    callback=check_host,
    help="Address that the coordinator listens on.",
)
@insecure_option
@click.option(
    "--port",
    type=PORT,
    help=f"Port of the coordinator; default: {USUAL_PORT}, or a free port if {USUAL_PORT} is taken.",
)
@click.option("--keep", is_flag=True, help="Keep the services after the run has ended, until Ctrl-C.")
@no_page_option
@click.option(
    "--resume",
    "resumed",
    multiple=True,
    metavar="RUN",
    help="Continue a run that has failed or is paused, as `paceline resume` does; may be given several times.",
)
@click.option(
    "--min-free-mb",
    default=MIN_FREE_MB,
    show_default=True,
    help="Admit no new groups while the directory's disk has less free space than this.",
)
@click.option(
    "--grace",
    "grace_s",
    type=SECONDS,
    default=GRACE_S,
    show_default=True,
    help="Seconds for the services to return leases and write a checkpoint at Ctrl-C or SIGTERM.",
)
@click.option(
    "--scale",
    is_flag=True,
    help="Add and remove workers of this host as the run needs them; `paceline status` explains the sizes. Between runs there are "
    "no workers.",
)
@click.option(
    "--bounds",
    multiple=True,
    metavar="POOL=FEWEST:MOST",
    callback=_bounds,
    help="With --scale: fewest and most workers of rollout, reward or environment; may be given for each. Default: 0 to "
    "the number of cores, or for workers with GPUs, 0 to cluster.*_workers.",
)
@functions_from_option
@user_code_options
@token_file_option
@shown_options
@linux_only
def up(
    spec: str | None,
    overrides: tuple[str, ...],
    directory: Path,
    no_page: bool,
    scale: bool,
    bounds: Mapping[str, tuple[int, int]],
    **options: Any,
) -> None:
    """Start all services on this host (as many as SPEC's `cluster` section says), submit SPEC and watch the run.

    Without SPEC, continue the open runs of the directory, and list the failed ones. A service that dies is started
    again; its output is in the directory's logs/.
    """
    from paceline.spec.reading import load_spec

    if bounds and not scale:
        raise click.UsageError("--bounds needs --scale")
    loaded = load_spec(spec, overrides) if spec else None
    run_here(loaded, directory, page=not no_page, scaled=bounds if scale else None, **options)


def run_here(
    spec: RunSpec | None,
    directory: Path,
    *,
    host: str,
    port: int | None,
    keep: bool,
    shown: Shown,
    resumed: tuple[str, ...] = (),
    min_free_mb: int = MIN_FREE_MB,
    functions_from: tuple[Path, ...] = (),
    grace_s: float = GRACE_S,
    store: str = "",
    scaled: Mapping[str, tuple[int, int]] | None = None,
    page: bool = True,
) -> None:
    """Start services in `directory`, submit `spec` if given, continue the runs of `resumed`, and follow all open runs
    to their end, also over restarts of the coordinator. With `scaled` (bounds by role, possibly none) the
    coordinator decides the number of workers. Exits with status 1 unless all runs succeed. Raises PacelineError."""
    say = functools.partial(click.echo, err=True)
    if spec is not None:
        check_paths_are_here(spec)
    left = left_runs(directory / LEDGER_NAME)
    for line in left.advice(resumed) if spec is None else left.unreadable.values():
        say(line)
    going_on = left.open | {run_id: left.chosen(run_id) for run_id in resumed}
    if spec is None and not going_on:
        raise _nothing_to_run(directory, left)
    specs = [*([spec] if spec else []), *going_on.values()]
    gpus = visible_gpus()
    spec, sizes = placed(spec, specs, len(gpus), say)
    options = _service_options(sizes, specs, min_free_mb, store, functions_from, scaled)
    port = free_port(host, USUAL_PORT) if port is None else port
    adopt()
    modules = imports_of(specs, sizes)
    cluster = LocalCluster(
        directory, sizes, host=host, port=port, grace_s=grace_s, options=options, say=say, gpus=gpus, preload=modules
    )
    interrupted: list[str] = []
    with ends_with_signals(), contextlib.ExitStack() as stack:
        stack.callback(_stop, cluster, interrupted, say)
        say(f"coordinator at {cluster.start_coordinator()}, ledger and logs in {cluster.directory}")
        client = stack.enter_context(Client(cluster.address, wait_s=math.inf, reconnect_s=math.inf))
        cluster.on_failure = client.close
        run_ids = _begun(client, spec, resumed, list(going_on), say)
        cluster.start_workers()
        if scaled is not None:
            from paceline.services.local.scaling import LocalScaler  # imports grpc

            stack.enter_context(LocalScaler(cluster, say))
        if page:
            start_page(cluster, host, say)
        if any(each.logger.trackers or each.logger.webhooks for each in specs):
            cluster.start_trackers()
        with _ends_explained(cluster, directory, say, run_ids, interrupted):
            succeeded = [_follow(client, run_id, left.events.get(run_id, 0), shown) for run_id in run_ids]
        if keep:
            _wait_until_interrupted(cluster, say)
        cluster.check()
        if not all(succeeded):
            raise click.exceptions.Exit(1)


@contextlib.contextmanager
def _ends_explained(
    cluster: LocalCluster,
    directory: Path,
    say: Callable[[str], None],
    run_ids: Sequence[str],
    interrupted: list[str],
) -> Iterator[None]:
    """After Ctrl-C print the command that continues the runs, and note the runs as interrupted; after another error
    raise the fault of a service that was given up, if there is one."""
    try:
        yield
    except KeyboardInterrupt:
        interrupted += run_ids
        say(f"stopping; `paceline up --directory {directory}` continues the open runs")
        raise click.exceptions.Exit(INTERRUPTED) from None
    except PacelineError:
        cluster.check()
        raise


def _service_options(
    sizes: ClusterSection,
    specs: list[RunSpec],
    min_free_mb: int,
    store: str,
    functions_from: tuple[Path, ...],
    scaled: Mapping[str, tuple[int, int]] | None,
) -> dict[str, list[str]]:
    allowed = function_folders(functions_from, specs)
    stored = ["--store", store] if store else []
    pools = []
    if scaled is not None:
        from paceline.services.local.scaling import scaled_pools  # imports grpc

        pools = scaled_pools(sizes, scaled)
    coordinator = ["--min-free-mb", str(min_free_mb), *stored, *pools, *allowed]
    return {"coordinator": coordinator, "reward": allowed, "environment": allowed}


def _nothing_to_run(directory: Path, left: LeftRuns) -> click.UsageError:
    return click.UsageError(
        f"{directory} has no open run{' that this version can read' if left.unreadable else ''}; name a SPEC to start "
        f"a run{', or a failed run with --resume' if left.failed else ''}"
    )


def _begun(
    client: Client, spec: RunSpec | None, resumed: Sequence[str], going_on: Sequence[str], say: Callable[[str], None]
) -> list[str]:
    """Resume and submit runs as requested; return the runs to follow: the new run, else all open runs."""
    for run_id in resumed:
        client.resume(run_id)
    if spec is None:
        return list(going_on)
    run_id = client.submit(spec).run_id
    if going_on:
        say(f"{going_on[0]} is still open and goes first; `paceline cancel {going_on[0]}` ends it")
    return [run_id]


def placed(
    spec: RunSpec | None, specs: Sequence[RunSpec], num_gpus: int, say: Callable[[str], None]
) -> tuple[RunSpec | None, ClusterSection]:
    """Return the spec with settings for this host, and the services of `specs`; print the choices. Raises SpecError."""
    sizes = named = sizes_for(specs)
    sizes, division = divide(sizes, num_gpus, rollout=sizes.rollout_workers > 0)
    if division:
        say(division)
    if named_in(sizes) and torch_is_for_cpus():
        raise SpecError(
            f"this host shows GPUs ({num_gpus}), but the installed torch is a build for CPUs; install a CUDA build (see "
            "`paceline doctor`), or set cluster.device=cpu and empty cluster.*_gpus"
        )
    if spec is None:
        return None, sizes
    if sizes is not named:
        spec = _with_division(spec, sizes)
    spec, chosen = planned_here(spec)
    for line in chosen:
        say(line)
    if warning := shortage(spec, available_bytes()):
        say(f"warning: {warning}")
    return spec, sizes


def _wait_until_interrupted(cluster: LocalCluster, say: Callable[[str], None]) -> None:
    """Keep the services after the end of their runs, until Ctrl-C or SIGTERM, or until a service is given up."""
    say("the services stay until Ctrl-C")
    try:
        while not cluster.wait(3600.0):
            pass
    except KeyboardInterrupt:
        say("stopping")


def _stop(cluster: LocalCluster, interrupted: Sequence[str], say: Callable[[str], None]) -> None:
    """End the services, and name the interrupted runs that have ended meanwhile."""
    try:
        cluster.stop()
        left = left_runs(cluster.directory / LEDGER_NAME) if interrupted else LeftRuns()
        for run_id in left.ended.keys() & interrupted:
            say(f"run {run_id} has ended before its services ({left.ended[run_id]}); nothing of it is left to continue")
    except KeyboardInterrupt:
        say("ended without waiting for the services; the next `paceline up` computes again what was not submitted")
        raise click.exceptions.Exit(INTERRUPTED) from None


def _follow(client: Client, run_id: str, earlier: int, shown: Shown) -> bool:
    """Show a run until it has ended; return whether it succeeded. A run that did not succeed does not stop the other
    runs."""
    try:
        follow(client, run_id, earlier=earlier, shown=shown)
    except click.exceptions.Exit:
        return False
    return True


def _with_division(spec: RunSpec, sizes: ClusterSection) -> RunSpec:
    """Return the spec with the GPUs of each role, so that a resumed run has the same division."""
    roles = ("learner",) if not spec.samples else ("learner", "rollout")
    given = {key: value for key, value in sizes if key.startswith(roles)}
    return spec.model_copy(update={"cluster": spec.cluster.model_copy(update=given)})


def function_folders(functions_from: tuple[Path, ...], specs: list[RunSpec]) -> list[str]:
    """Return the options `--functions-from` of the services: the folders that the user allows, and the specs' folders."""
    if not functions_from:
        return []
    folders = [*map(str, functions_from), *(spec.folder for spec in specs if spec.folder)]
    return [word for folder in dict.fromkeys(folders) for word in ("--functions-from", folder)]


@contextlib.contextmanager
def ends_with_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the command as Ctrl-C does, so that the services are stopped."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:  # else click would print "Aborted!"
        raise click.exceptions.Exit(INTERRUPTED) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


MAX_SHOWN = 5
"""At most this many failed runs are listed, the newest first."""


class Failed(NamedTuple):
    why: str
    spec_yaml: str


@dataclass
class LeftRuns:
    """Open, failed and ended runs by id, oldest first."""

    open: dict[str, RunSpec] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    """Reason and remedy for each open run whose spec this version cannot read, by run id."""
    failed: dict[str, Failed] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    """Sequence number of the newest event of each run, by run id."""
    ended: dict[str, str] = field(default_factory=dict)
    """State of each ended run, by run id."""

    def advice(self, resumed: Sequence[str] = ()) -> list[str]:
        """Return a sentence for each run that needs a person, except for the runs in `resumed`."""
        failed = [(run_id, failed_run) for run_id, failed_run in self.failed.items() if run_id not in resumed]
        newest = failed[: -MAX_SHOWN - 1 : -1]
        sentences = [
            *self.unreadable.values(),
            *(
                f"run {run_id} has failed ({failed_run.why}); --resume {run_id} queues it again"
                for run_id, failed_run in newest
            ),
        ]
        if len(failed) > MAX_SHOWN:
            sentences.append(f"{len(failed) - MAX_SHOWN} older runs have failed too")
        return sentences

    def chosen(self, run_id: str) -> RunSpec:
        """Return the spec of a run to resume. Raises NotFound, SpecError."""
        from paceline.spec.reading import spec_of_run

        if run_id in self.failed:
            return spec_of_run(run_id, self.failed[run_id].spec_yaml)[0]
        if run_id in self.unreadable:
            raise SpecError(self.unreadable[run_id])
        if run_id in self.open:
            return self.open[run_id]
        run_ids = ", ".join([*self.open, *self.failed]) or "none"
        raise NotFound(f"no run {run_id!r} has failed or is open; the failed and open runs are: {run_ids}")


def left_runs(ledger_path: Path) -> LeftRuns:
    """Return the runs in the ledger; none without a ledger. A ledger of an older format is upgraded first. Raises
    LedgerFault, Conflict."""
    from paceline.services.coordinator.ledger.connection import OlderFormat
    from paceline.services.coordinator.ledger.file_check import explained
    from paceline.services.coordinator.ledger.ledger import Ledger
    from paceline.spec.reading import spec_of_run

    left = LeftRuns()
    try:
        ledger = Ledger(ledger_path, read_only=True)
    except NotFound:
        return left
    except OlderFormat:
        Ledger(ledger_path).close()
        ledger = Ledger(ledger_path, read_only=True)
    with contextlib.closing(ledger), explained(ledger.db, ledger.path):
        for row in sorted(ledger.runs(), key=lambda row: row["state"] == "paused"):  # others go before paused runs
            run_id = row["run_id"]
            if row["state"] == "failed" or row["state"] not in ENDED_STATES:
                left.events[run_id] = ledger.last_sequence(run_id)
            if row["state"] == "failed":
                left.failed[run_id] = Failed(row["message"], row["spec_yaml"])
            elif row["state"] in ENDED_STATES:
                left.ended[run_id] = row["state"]
            else:
                try:
                    left.open[run_id] = spec_of_run(run_id, row["spec_yaml"])[0]
                except SpecError as error:
                    left.unreadable[run_id] = str(error)
    return left

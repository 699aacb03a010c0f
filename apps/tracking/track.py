"""`paceline track [RUN]`: send runs to experiment trackers, from wherever the coordinator or its ledger can be read.

A run is not affected, so the command can be started, stopped and restarted at any time. Without RUN, every run whose
spec names trackers or webhooks is sent to them, new runs included. Each run and tracker has a thread, so one that hangs
does not delay others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click
from pydantic import ValidationError

from paceline.apps.tracking.follower import Follower, Setting, Target, is_done, named
from paceline.client import ENDED_STATES, Client, state_name
from paceline.errors import InvalidInput, NotFound, PacelineError, SpecError
from paceline.files.names import LEDGER_NAME
from paceline.rate_limited_log import RateLimitedLog
from paceline.records import Records
from paceline.services.cli.recorded.source import Source, ledger_source, records_of, records_of_run, source_options
from paceline.spec.reading import spec_of_run
from paceline.spec.sections.system import TrackerSection

KINDS = ("wandb", "mlflow", "tensorboard")


@click.command()
@click.argument("run", required=False)
@click.option("--to", "kinds", multiple=True, type=click.Choice(KINDS), help="Tracker; repeatable. Default: those "
              "of the spec's logger.trackers.")  # fmt: skip
@click.option("--project", help="Tracker's project (MLflow: experiment).")
@click.option("--url", help="URL of the tracker's server.")
@click.option("--offline", is_flag=True, help="W&B: write files for `wandb sync`.")
@click.option("--names", type=click.Choice(["paceline", "trl", "nemo_rl"]), help="Library whose names the metrics get.")
@click.option("--samples", type=click.IntRange(0, 64), help="Groups of each step whose completions are sent.")
@click.option("--page", default="", metavar="URL", help="Address of the dashboard, which the tracker's run links to.")
@click.option("--now", "only_now", is_flag=True, help="Send everything recorded and end, even if the run goes on.")
@source_options
def track(
    run: str | None,
    kinds: tuple[str, ...],
    project: str | None,
    url: str | None,
    offline: bool,
    names: str | None,
    samples: int | None,
    page: str,
    only_now: bool,
    directory: Path,
    coordinator: str | None,
) -> None:
    """Send RUN (its id or its folder) to trackers until it has ended. Without RUN, send every run whose spec names
    trackers or webhooks, until Ctrl-C.

    trackers/ of --directory holds the positions: a second start resumes there, and entries that a tracker missed are
    sent later, in order, once. Keys are read from the tracker's variables (WANDB_API_KEY, MLFLOW_TRACKING_TOKEN).
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    given = {"project": project, "url": url, "names": names, "samples_per_step": samples}
    changes = {key: value for key, value in given.items() if value is not None}
    changes |= {"offline": True} if offline else {}
    stop = threading.Event()
    _end_with_signals(stop)
    if run is None:
        if kinds or changes or only_now:
            raise click.UsageError("without RUN the trackers are those of the specs; name a RUN to use these options")
        with records_of(directory, coordinator) as source:
            where = _SourceOpener(source)
        Tracking(where.opened, directory, where.links(page), stop).run()
        _leave()
    with records_of_run(run, directory, coordinator) as (source, run_id):
        source.get(run_id)
        settings = _settings(source, run_id, kinds, changes)
        where = _SourceOpener(source)
    # One thread for each, because libraries block; the process ends without threads that hang.
    links = where.links(f"{page.rstrip('/')}/#/run/{run_id}" if page else "")
    folder = folder_of(directory, run_id)
    targets = [Target(run_id, name, each, folder, links, only_now) for name, each in settings.items()]
    records = records_opening(where.opened)
    senders = [Sender(Follower(each, records), f"{run_id} to {each.name}") for each in targets]
    while any(sender.thread.is_alive() for sender in senders) and not stop.wait(0.1):
        pass
    all_ended = end(senders)
    for sender in senders:
        click.echo(
            f"{sender.name}: {sender.follower.sent} entries sent{f'; {sender.failure}' if sender.failure else ''}"
        )
    if not all_ended:
        _leave(1)
    if any(sender.failure for sender in senders):
        raise click.exceptions.Exit(1)


class _SourceOpener:
    """The command's source of the records; each thread opens its own."""

    def __init__(self, source: Source):
        self._address = source.address if isinstance(source, Client) else ""
        self._path = Path(LEDGER_NAME) if isinstance(source, Client) else source.ledger.path

    def opened(self) -> AbstractContextManager[Source]:
        return Client(self._address) if self._address else ledger_source(self._path)

    def links(self, page: str) -> dict[str, str]:
        found = {"coordinator": self._address} if self._address else {"ledger": str(self._path)}
        return found | ({"page": page} if page else {})


def _settings(
    source: Source, run_id: str, kinds: tuple[str, ...], changes: Mapping[str, str | int]
) -> dict[str, Setting]:
    """Return the settings of trackers and webhooks by name. If the command names trackers, only these are used, with
    the spec's settings for their kinds; else all trackers and webhooks of the spec are used. Raises NotFound,
    InvalidInput."""
    spec, _ = spec_of_run(run_id, source.records.spec_yaml(run_id))
    in_spec = named(spec.logger)
    trackers = {tracker.kind: tracker.model_dump() for tracker in spec.logger.trackers}
    chosen: list[str] = list(kinds) or list(trackers)
    if not kinds and not in_spec:
        raise NotFound(
            f"the spec of {run_id} names no tracker (logger.trackers); name one with --to, such as --to wandb"
        )
    if len(chosen) > 1 and "url" in changes:
        raise InvalidInput(f"--url is for one tracker, but {' and '.join(chosen)} are chosen; run one command for each")
    settings = {} if kinds else {name: each for name, each in in_spec.items() if name not in trackers}
    for kind in dict.fromkeys(chosen):
        before = trackers.get(kind, {"kind": kind})  # type: ignore[call-overload]
        try:
            settings[kind] = TrackerSection.model_validate({**before, **changes})
        except ValidationError as error:
            raise InvalidInput("; ".join(str(item["msg"]) for item in error.errors())) from None
    return settings


def _end_with_signals(stop: threading.Event) -> None:
    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


def _leave(status: int = 0) -> NoReturn:
    """Exit at once, without the libraries' exit handlers, which may wait for their servers. Sent entries are on disk."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


def main() -> None:
    """Run the command by itself, as the supervisor of `paceline up` does."""
    try:
        track()
    except PacelineError as error:
        sys.exit(f"Error: {error}")


END_S = 8.0
"""Seconds that senders have to end. The process exits even if a sender still hangs."""
MAX_SENDERS = 64
FOLDER = "trackers"
"""Folder beside the ledger that has the cursors."""
log = logging.getLogger(__name__)
seldom = RateLimitedLog(log, interval_s=30.0)


Opening = Callable[[], AbstractContextManager[Source]]


class Sender:
    def __init__(self, follower: Follower, name: str):
        self.follower, self.name = follower, name
        self.failure = ""
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.follower.run()
        except PacelineError as error:
            self.failure = str(error)
            log.error("%s: %s", self.name, error)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            log.exception("%s ended with an unexpected error", self.name)


class Tracking:
    def __init__(
        self, opening: Opening, directory: Path, links: Mapping[str, str], stop: threading.Event, look_s: float = 10.0
    ):
        self._opening, self._directory, self._links, self._stop = opening, directory, dict(links), stop
        self._look_s = look_s
        self._settings: dict[str, dict[str, Setting]] = {}
        self._senders: dict[tuple[str, str], Sender] = {}

    def run(self) -> None:
        """Poll for runs until `stop` is set, then end all senders."""
        while True:
            try:
                with self._opening() as source:
                    self._look(source)
            except Exception as error:  # the coordinator is away, or one record cannot be read
                seldom.warning("look", "the runs cannot be read: %s; trying again", error)
            if self._stop.wait(self._look_s):
                break
        end(list(self._senders.values()))

    def _look(self, source: Source) -> None:
        """Start a sender for each run and tracker that may have unsent entries."""
        for run in source.runs():
            has_ended = state_name(run) in ENDED_STATES
            for name, setting in self._trackers(source, run.run_id).items():
                key, folder = (run.run_id, name), folder_of(self._directory, run.run_id)
                before = self._senders.get(key)
                if before is not None and (before.thread.is_alive() or before.failure):
                    continue
                if (has_ended and is_done(folder, name)) or len(self._alive()) >= MAX_SENDERS:
                    continue
                target = Target(run.run_id, name, setting, folder, self._links)
                follower = Follower(target, records_opening(self._opening))
                self._senders[key] = Sender(follower, f"{run.run_id} to {name}")

    def _alive(self) -> list[Sender]:
        return [sender for sender in self._senders.values() if sender.thread.is_alive()]

    def _trackers(self, source: Source, run_id: str) -> dict[str, Setting]:
        if run_id not in self._settings:
            try:
                spec, _ = spec_of_run(run_id, source.records.spec_yaml(run_id))
                self._settings[run_id] = named(spec.logger)
            except SpecError as error:
                log.warning("%s", error)
                self._settings[run_id] = {}
        return self._settings[run_id]


def end(senders: list[Sender]) -> bool:
    """Tell senders to end once everything recorded is sent, wait up to END_S, and return whether all have ended."""
    for sender in senders:
        sender.follower.stop.set()
    until_s = time.monotonic() + END_S
    for sender in senders:
        sender.thread.join(max(0.0, until_s - time.monotonic()))
    return not any(sender.thread.is_alive() for sender in senders)


def folder_of(directory: Path, run_id: str) -> Path:
    return directory / FOLDER / run_id


def records_opening(opening: Opening) -> Callable[[], AbstractContextManager[Records]]:
    @contextlib.contextmanager
    def opened() -> Iterator[Records]:
        with opening() as source:
            yield source.records

    return opened


if __name__ == "__main__":
    main()

"""`paceline track [RUN]`: send runs to experiment trackers, from wherever the coordinator or its ledger can be read. A run is not
touched by it, so it can be started, stopped and started again at any time."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click
from pydantic import ValidationError

from paceline.apps.tracking.follower import Follower, Target
from paceline.apps.tracking.opening import Setting, named
from paceline.apps.tracking.service import Sender, Tracking, end, folder_of, records_opening
from paceline.client import Client
from paceline.errors import InvalidInput, NotFound, PacelineError
from paceline.files.names import LEDGER_NAME
from paceline.services.cli.recorded.source import (
    Source,
    ledger_source,
    records_of,
    records_of_run,
    source_options,
)
from paceline.spec.reading import spec_of_run
from paceline.spec.sections.system import TrackerSection

KINDS = ("wandb", "mlflow", "tensorboard")


@click.command()
@click.argument("run", required=False)
@click.option("--to", "kinds", multiple=True, type=click.Choice(KINDS), help="Tracker; may be given several times. Default: those "
              "of the spec's logger.trackers.")  # fmt: skip
@click.option("--project", help="Project there (MLflow: experiment).")
@click.option("--url", help="Server of the tracker.")
@click.option("--offline", is_flag=True, help="W&B: write files for `wandb sync`.")
@click.option(
    "--names", type=click.Choice(["paceline", "trl", "nemo_rl"]), help="Whose names the metrics get."
)
@click.option("--samples", type=click.IntRange(0, 64), help="Groups of each step whose completions are sent.")
@click.option(
    "--page", default="", metavar="URL", help="Address of the page, to which the tracker's run links."
)
@click.option(
    "--now", "only_now", is_flag=True, help="Send what is on record and end, also if the run goes on."
)
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
    """Send RUN (its id or its folder) to trackers until it has ended; without RUN every run whose spec names trackers or webhooks, until
    Ctrl-C.

    What was sent is noted in trackers/ of --directory: a second start goes on there, and what a tracker missed is sent later, in order,
    once. Keys are read from the tracker's own variables (WANDB_API_KEY, MLFLOW_TRACKING_TOKEN).
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    given = {"project": project, "url": url, "names": names, "samples_per_step": samples}
    changes = {key: value for key, value in given.items() if value is not None}
    changes |= {"offline": True} if offline else {}
    stop = threading.Event()
    _end_with_signals(stop)
    if run is None:
        if kinds or changes or only_now:
            raise click.UsageError(
                "without RUN the trackers are those of the specs; name a RUN with these options"
            )
        with records_of(directory, coordinator) as source:
            where = _Where(source)
        Tracking(where.opened, directory, where.links(page), stop).run()
        _leave()
    with records_of_run(run, directory, coordinator) as (source, run_id):
        source.get(run_id)
        settings = _settings(source, run_id, kinds, changes)
        where = _Where(source)
    # One thread for each, because libraries block; the process ends without those that hang.
    links = where.links(f"{page.rstrip('/')}/#/run/{run_id}" if page else "")
    senders = [
        Sender(
            Follower(
                Target(run_id, name, setting, folder_of(directory, run_id), links, only_now),
                records_opening(where.opened),
            ),
            f"{run_id} to {name}",
        )
        for name, setting in settings.items()
    ]
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


class _Where:
    """How a thread opens the records that the command was pointed at."""

    def __init__(self, source: Source):
        self._address = source.address if isinstance(source, Client) else ""
        self._path = Path(LEDGER_NAME) if isinstance(source, Client) else source.ledger.path

    def opened(self) -> AbstractContextManager[Source]:
        """Open the records."""
        return Client(self._address) if self._address else ledger_source(self._path)

    def links(self, page: str) -> dict[str, str]:
        """Return where the run is found."""
        found = {"coordinator": self._address} if self._address else {"ledger": str(self._path)}
        return found | ({"page": page} if page else {})


def _settings(
    source: Source, run_id: str, kinds: tuple[str, ...], changes: Mapping[str, str | int]
) -> dict[str, Setting]:
    """Return what to send to, by name: the trackers that are named, with the spec's settings of their kind, else those of the spec
    with its webhooks. Raises NotFound, InvalidInput."""
    spec, _ = spec_of_run(run_id, source.records.spec_yaml(run_id))
    in_spec = named(spec.logger)
    trackers = {tracker.kind: tracker.model_dump() for tracker in spec.logger.trackers}
    chosen: list[str] = list(kinds) or list(trackers)
    if not kinds and not in_spec:
        raise NotFound(
            f"the spec of {run_id} names no tracker (logger.trackers); name one with --to, as --to wandb"
        )
    if len(chosen) > 1 and "url" in changes:
        raise InvalidInput(
            f"--url is for one tracker, and {' and '.join(chosen)} are meant; start one command for each"
        )
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
    """End at once, without the libraries' handlers of the end, which may wait for their servers. What was sent is on the disk."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


def main() -> None:
    """Run the command by itself, as the supervisor of `paceline up` does."""
    try:
        track()
    except PacelineError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()

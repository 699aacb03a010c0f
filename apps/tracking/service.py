"""Sends every run whose spec names trackers or webhooks to these, new runs included, until it is told to stop. One thread for each run and tracker:
one that hangs keeps no other waiting."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from paceline.apps.tracking.cursor import is_done
from paceline.apps.tracking.follower import Follower, Target
from paceline.apps.tracking.opening import Setting, named
from paceline.client import ENDED_STATES, state_name
from paceline.errors import PacelineError, SpecError
from paceline.rate_limited_log import RateLimitedLog
from paceline.records import Records
from paceline.spec.reading import spec_of_run

if TYPE_CHECKING:
    from paceline.v1.run_pb2 import Run

LOOK_S = 10.0
END_S = 8.0
"""Seconds that senders have to end; one that hangs is left behind with the process."""
MAX_SENDERS = 64
FOLDER = "trackers"
"""Folder beside the ledger that has the cursors."""
log = logging.getLogger(__name__)
seldom = RateLimitedLog(log, interval_s=30.0)


class Source(Protocol):
    """The records of all runs."""

    @property
    def records(self) -> Records:
        """The records."""

    def runs(self) -> list[Run]:
        """Return all runs."""


Opening = Callable[[], AbstractContextManager[Source]]


class Sender:
    """A follower in its thread."""

    def __init__(self, follower: Follower, name: str):
        self.follower, self.name = follower, name
        self.failure = ""
        """Why it ended before its time."""
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
            log.exception("%s ended by an unforeseen error", self.name)


class Tracking:
    """The senders of a coordinator's runs."""

    def __init__(self, opening: Opening, directory: Path, links: Mapping[str, str], stop: threading.Event):
        self._opening, self._directory, self._links, self._stop = opening, directory, dict(links), stop
        self._settings: dict[str, dict[str, Setting]] = {}
        """Trackers and webhooks by run, of runs that were looked at."""
        self._senders: dict[tuple[str, str], Sender] = {}

    def run(self) -> None:
        """Look for runs until told to stop, and end all senders then."""
        while True:
            try:
                with self._opening() as source:
                    self._look(source)
            except Exception as error:  # the coordinator is away, or one record cannot be read
                seldom.warning("look", "the runs cannot be read: %s; trying again", error)
            if self._stop.wait(LOOK_S):
                break
        end(list(self._senders.values()))

    def _look(self, source: Source) -> None:
        """Start a sender for each run and tracker of which something may be missing."""
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
    """Tell senders to end once they have sent what is on record, and wait for them, not for long; return whether all have ended."""
    for sender in senders:
        sender.follower.stop.set()
    until_s = time.monotonic() + END_S
    for sender in senders:
        sender.thread.join(max(0.0, until_s - time.monotonic()))
    return not any(sender.thread.is_alive() for sender in senders)


def folder_of(directory: Path, run_id: str) -> Path:
    """Return the folder of a run's cursors."""
    return directory / FOLDER / run_id


def records_opening(opening: Opening) -> Callable[[], AbstractContextManager[Records]]:
    """Return a function that opens records alone."""

    @contextlib.contextmanager
    def opened() -> Iterator[Records]:
        with opening() as source:
            yield source.records

    return opened

"""Sends one run to one tracker: all entries in order, once, until the run has ended.

Whatever fails, the records or the tracker, is tried again later, for as long as it takes; the run knows nothing of it. An entry counts
as sent when the tracker has taken it. The cursor is written after that, so a death in between leads to a repetition, which the tracker
recognizes by the entry's sequence number.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from paceline.apps.tracking.cursor import Cursor
from paceline.apps.tracking.entries import Entry, entries
from paceline.apps.tracking.names import Style
from paceline.apps.tracking.opening import Setting, open_tracker
from paceline.apps.tracking.tracker import Refused, TrackedRun, Tracker
from paceline.calls.backoff import ExponentialBackoff
from paceline.client import ENDED_STATES
from paceline.encryption.storage_key import storage_key
from paceline.errors import Conflict, InvalidInput, NotFound
from paceline.rate_limited_log import RateLimitedLog
from paceline.records import Records
from paceline.spec.sections.system import TrackerSection

POLL_S = 2.0
FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0
log = logging.getLogger(__name__)
seldom = RateLimitedLog(log, interval_s=30.0)


class Target(NamedTuple):
    """What is sent where."""

    run_id: str
    name: str
    """Name of the cursor: the kind of a tracker; of a webhook also its address."""
    setting: Setting
    folder: Path
    """Folder of the run's cursors and of trackers' files."""
    links: dict[str, str]
    only_now: bool = False
    """End when all that is on record was sent, also if the run goes on."""


class Follower:
    """One run at one tracker."""

    def __init__(
        self,
        target: Target,
        records: Callable[[], AbstractContextManager[Records]],
        open_: Callable[[Setting, TrackedRun, Path], Tracker] = open_tracker,
    ):
        """`records` opens the records in the calling thread."""
        self._target, self._records, self._open = target, records, open_
        self.stop = threading.Event()
        """Set to end as soon as what is on record was sent, or a try has failed."""
        self.sent = 0
        """Entries that were sent since the start."""

    def run(self) -> None:
        """Send until the run has ended and all was sent, or `stop` is set. Raises NotFound (no such run, a library that is not
        installed), Conflict and InvalidInput (the cursor)."""
        name = self._target.name
        if hides_texts():
            log.info(
                "%s: %s gets no samples and no texts of the spec, because of the storage key",
                self._target.run_id,
                name,
            )
        cursor = Cursor(self._target.folder, name)
        backoff = ExponentialBackoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        try:
            while not self.stop.is_set():
                before = self.sent
                try:
                    if self._attempt(cursor):
                        return
                except (NotFound, Conflict, InvalidInput):
                    raise
                except (
                    Exception
                ) as error:  # of any library, the network or the coordinator: all of it may pass
                    text = f"{type(error).__name__}: {error}"[:500]
                    seldom.warning(name, "%s: %s waits: %s; trying again", self._target.run_id, name, text)
                if self.sent > before:
                    backoff.reset()
                self.stop.wait(backoff.next_s())
        finally:
            cursor.close()

    def _attempt(self, cursor: Cursor) -> bool:
        """Open records and tracker and send; return whether all is done."""
        target, alerted = self._target, cursor.sequence
        with self._records() as records:
            run = TrackedRun(target.run_id, cursor.identity, _config(records, target.run_id), target.links)
            tracker = self._open(target.setting, run, target.folder)
            ended = ""
            try:
                position = tracker.position()
                if position is not None:
                    alerted, cursor.sequence = max(alerted, position), position
                if tracker.url != cursor.url:
                    cursor.url = tracker.url
                    cursor.save()
                    log.info("%s is at %s", target.run_id, cursor.url)
                while True:
                    stopping = self.stop.is_set()
                    self._send_recorded(records, tracker, cursor, alerted)
                    ended = cursor.ended
                    if ended or target.only_now or stopping:
                        break
                    self.stop.wait(POLL_S)
            finally:
                tracker.close()
        cursor.done = bool(ended)
        cursor.save()
        return True

    def _send_recorded(self, records: Records, tracker: Tracker, cursor: Cursor, alerted: int) -> None:
        """Send what is on record. The tracker has the warnings up to `alerted` already."""
        setting = self._target.setting
        names: Style = "paceline"
        samples = 0
        if isinstance(setting, TrackerSection):
            names, samples = setting.names, 0 if hides_texts() else setting.samples_per_step
        found = entries(
            records,
            self._target.run_id,
            after=cursor.sequence,
            time_s=cursor.time_s,
            names=names,
            samples=samples,
        )
        for entry in found:
            try:
                if not entry.alert or entry.step.sequence > alerted:
                    _send(tracker, entry)
            except Refused as error:
                cursor.refused += 1
                log.warning(
                    "%s: %s refuses an entry, which is left out: %s",
                    self._target.run_id,
                    self._target.name,
                    error,
                )
            cursor.sequence, cursor.time_s = entry.step.sequence, entry.step.time_s
            if entry.state:
                cursor.ended, cursor.done = entry.state if entry.state in ENDED_STATES else "", False
            cursor.save()
            self.sent += 1


def _send(tracker: Tracker, entry: Entry) -> None:
    if entry.alert:
        tracker.alert(entry.step, entry.alert, entry.text)
    elif entry.state:
        tracker.change_state(entry.step, entry.state, entry.text)
    elif entry.metrics or entry.samples:
        tracker.log(entry.step, entry.metrics, entry.samples)


def _config(records: Records, run_id: str) -> dict[str, object]:
    import yaml

    found = yaml.safe_load(records.spec_yaml(run_id))
    if not isinstance(found, dict):
        return {}
    if isinstance(found.get("logger"), dict):  # addresses of trackers and webhooks are nobody else's business
        for name in ("trackers", "webhooks"):
            found["logger"].pop(name, None)
    return _without_texts(found) if hides_texts() else found


def hides_texts() -> bool:
    """Return whether trackers get no texts: where this process has a storage key, prompts and completions stay encrypted."""
    return storage_key() is not None


def _without_texts(config: Any) -> Any:
    """Return a spec without its texts, such as the system prompt: numbers, truth values and what holds them."""
    if isinstance(config, dict):
        return {key: _without_texts(value) for key, value in config.items() if not isinstance(value, str)}
    if isinstance(config, list):
        return [_without_texts(value) for value in config if not isinstance(value, str)]
    return config

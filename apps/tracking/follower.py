"""Sends one run to one tracker: all entries in order, once, until the run has ended.

Any failure, of the records or of the tracker, is retried without limit; the run is not affected. The cursor is written
once the tracker has taken an entry; a crash in between repeats the entry, which its sequence number identifies.

Promise: one process at a time sends a run to a tracker; after any crash it resumes at the first entry in doubt.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import threading
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, NamedTuple

from paceline.apps.tracking.names import Style
from paceline.apps.tracking.tracker import Entry, Refused, TrackedRun, Tracker, entries
from paceline.calls.backoff import ExponentialBackoff
from paceline.client import ENDED_STATES
from paceline.encryption.storage_key import storage_key
from paceline.errors import Conflict, InvalidInput, NotFound, Unreadable
from paceline.files.whole_file import write_whole
from paceline.rate_limited_log import RateLimitedLog
from paceline.records import Records
from paceline.spec.sections.system import LoggerSection, TrackerSection, WebhookSection

MAX_BACKOFF_S = 60.0
log = logging.getLogger(__name__)
seldom = RateLimitedLog(log, interval_s=30.0)


Setting = TrackerSection | WebhookSection


def named(logger: LoggerSection) -> dict[str, Setting]:
    """Map the name of a cursor to its tracker or webhook, for all trackers and webhooks of a spec."""
    found: dict[str, Setting] = {tracker.kind: tracker for tracker in logger.trackers}
    for webhook in logger.webhooks:
        address = webhook.url or f"${webhook.url_variable}"
        found[f"webhook-{hashlib.sha256(address.encode()).hexdigest()[:8]}"] = webhook
    return found


def open_tracker(setting: Setting, run: TrackedRun, folder: Path) -> Tracker:
    """Return the tracker of a run. `folder` is for its files. Raises NotFound when its library is not installed."""
    if isinstance(setting, WebhookSection):
        from paceline.apps.tracking.backends.webhook import Webhook

        return Webhook(setting, run)
    match setting.kind:
        case "wandb":
            from paceline.apps.tracking.backends.wandb_run import WandbRun

            return WandbRun(setting, run, folder)
        case "mlflow":
            from paceline.apps.tracking.backends.mlflow_run import MlflowRun

            return MlflowRun(setting, run)
        case "tensorboard":
            from paceline.apps.tracking.backends.tensorboard_run import TensorboardRun

            return TensorboardRun(folder)
    raise ValueError(f"unknown tracker {setting.kind!r}")


class Target(NamedTuple):
    run_id: str
    name: str
    """Name of the cursor: the tracker's kind, and for a webhook also the address."""
    setting: Setting
    folder: Path
    """Folder of the run's cursors and of trackers' files."""
    links: dict[str, str]
    only_now: bool = False
    """True to end once everything recorded is sent, even if the run goes on."""


class Follower:
    def __init__(
        self,
        target: Target,
        records: Callable[[], AbstractContextManager[Records]],
        open_: Callable[[Setting, TrackedRun, Path], Tracker] = open_tracker,
        first_backoff_s: float = 1.0,
        poll_s: float = 2.0,
    ):
        """`records` opens the records in the calling thread."""
        self._target, self._records, self._open = target, records, open_
        self._first_backoff_s, self._poll_s = first_backoff_s, poll_s
        self.stop = threading.Event()
        """Set to end as soon as everything recorded is sent, or an attempt has failed."""
        self.sent = 0

    def run(self) -> None:
        """Send until the run has ended and everything is sent, or `stop` is set. Raises NotFound for an unknown run or
        a missing library, Conflict and InvalidInput for the cursor."""
        name = self._target.name
        if hides_texts():
            log.info(
                "%s: %s gets no samples and no texts of the spec, because a storage key is set",
                self._target.run_id,
                name,
            )
        cursor = Cursor(self._target.folder, name)
        backoff = ExponentialBackoff(self._first_backoff_s, MAX_BACKOFF_S)
        try:
            while not self.stop.is_set():
                before = self.sent
                try:
                    if self._attempt(cursor):
                        return
                except (NotFound, Conflict, InvalidInput):
                    raise
                except Exception as error:  # an error of any library, the network or the coordinator may be temporary
                    text = f"{type(error).__name__}: {error}"[:500]
                    seldom.warning(name, "%s: sending to %s failed: %s; trying again", self._target.run_id, name, text)
                if self.sent > before:
                    backoff.reset()
                self.stop.wait(backoff.next_s())
        finally:
            cursor.close()

    def _attempt(self, cursor: Cursor) -> bool:
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
                    self.stop.wait(self._poll_s)
            finally:
                tracker.close()
        cursor.done = bool(ended)
        cursor.save()
        return True

    def _send_recorded(self, records: Records, tracker: Tracker, cursor: Cursor, alerted: int) -> None:
        """Send everything recorded. The tracker already has the warnings up to sequence number `alerted`."""
        setting = self._target.setting
        names: Style = "paceline"
        samples = 0
        if isinstance(setting, TrackerSection):
            names, samples = setting.names, 0 if hides_texts() else setting.samples_per_step
        found = entries(
            records, self._target.run_id, after=cursor.sequence, time_s=cursor.time_s, names=names, samples=samples
        )
        for entry in found:
            try:
                if not entry.alert or entry.step.sequence > alerted:
                    _send(tracker, entry)
            except Refused as error:
                cursor.refused += 1
                log.warning(
                    "%s: %s refuses an entry, which is left out: %s", self._target.run_id, self._target.name, error
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
    if isinstance(found.get("logger"), dict):  # trackers must not learn the addresses of other trackers and webhooks
        for name in ("trackers", "webhooks"):
            found["logger"].pop(name, None)
    return _without_texts(found) if hides_texts() else found


def hides_texts() -> bool:
    """Return whether trackers get no texts: with a storage key in this process, prompts and completions stay encrypted."""
    return storage_key() is not None


def _without_texts(config: Any) -> Any:
    """Return a spec reduced to numbers, truth values and their containers, without texts such as the system prompt."""
    if isinstance(config, dict):
        return {key: _without_texts(value) for key, value in config.items() if not isinstance(value, str)}
    if isinstance(config, list):
        return [_without_texts(value) for value in config if not isinstance(value, str)]
    return config


FIELDS = ("identity", "sequence", "time_s", "ended", "done", "url", "refused")


class Cursor:
    def __init__(self, folder: Path, kind: str):
        """Read the file of a tracker, or begin it. Raises Conflict while another process has it, Unreadable, OSError."""
        path = _path(folder, kind)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._lock: IO[str] = path.with_suffix(".lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise Conflict(f"another process sends this run to the tracker ({path} is locked); stop it first") from None
        try:
            content = self._read()
        except BaseException:
            self._lock.close()
            raise
        self.identity = str(content.get("identity") or uuid.uuid4().hex)
        self.sequence = int(content.get("sequence", 0))
        """Sequence number of the newest entry sent."""
        self.time_s = float(content.get("time_s", 0.0))
        """Time of the newest entry sent, in seconds since 1970. An entry without a time gets this time."""
        self.ended = str(content.get("ended", ""))
        """State of the run if it had ended before the newest sent entry; else empty."""
        self.done = bool(content.get("done"))
        """True if everything about an ended run is sent and the tracker knows its end."""
        self.url = str(content.get("url", ""))
        self.refused = int(content.get("refused", 0))
        """Number of entries that the tracker refused."""
        self.save()

    def save(self) -> None:
        """Write the file and sync it to disk. Raises OSError."""
        content = {name: getattr(self, name) for name in FIELDS}
        write_whole(self._path, json.dumps(content) + "\n", durable=True)

    def close(self) -> None:
        self._lock.close()

    def _read(self) -> dict[str, Any]:
        if not os.path.exists(self._path):
            return {}
        try:
            content: dict[str, Any] = json.loads(self._path.read_text())
            if not isinstance(content, dict) or int(content["sequence"]) < 0 or not content["identity"]:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise Unreadable(
                f"{self._path} is damaged; remove it to send the run again from its beginning, as a new run of the tracker"
            ) from None
        return content


def is_done(folder: Path, kind: str) -> bool:
    """Return whether a tracker's cursor says that all of an ended run is sent."""
    try:
        return bool(json.loads(_path(folder, kind).read_text())["done"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _path(folder: Path, kind: str) -> Path:
    return folder / f"{kind}.json"

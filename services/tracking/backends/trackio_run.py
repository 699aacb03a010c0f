"""A run in trackio: its database on this machine, or a trackio server.

Entries go through the calls under `trackio.log`, because that returns before anything is stored and drops what a dead process had
not sent. These calls return when the entry is stored, and take an id by which trackio ignores repetitions.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from paceline.spec.sections.system import TrackerSection
from services.tracking.tracker import TITLES, AlertKind, Row, Step, TrackedRun, library

TIMEOUT_S = 10
TABLE = "samples"
LEVELS = {"succeeded": "info", "cancelled": "info", "failed": "error"}


class TrackioRun:
    """See services/tracking/tracker.py."""

    def __init__(self, setting: TrackerSection, run: TrackedRun):
        self._project, self._run = setting.project, run
        self._config = {**run.config, **{f"paceline_{name}": text for name, text in run.links.items()}}
        self._server: Any = None
        self._url = setting.url or os.environ.get("TRACKIO_SERVER_URL", "")
        if self._url:
            client = library("trackio.remote_client").RemoteClient
            token = os.environ.get("TRACKIO_WRITE_TOKEN")
            self._server = client(self._url, write_token=token, httpx_kwargs={"timeout": TIMEOUT_S})
        else:
            self._storage: Any = library("trackio.sqlite_storage").SQLiteStorage

    @property
    def url(self) -> str:
        """Return the server's address; empty for the database here, which `trackio show` serves."""
        return f"{self._url.rstrip('/')}/?project={self._project}" if self._url else ""

    def position(self) -> int | None:
        """Return None: the caller's cursor counts, and repetitions change nothing."""
        return None

    def log(self, step: Step, metrics: Mapping[str, float], samples: Sequence[Row]) -> None:
        """Store metrics and the table of samples in one entry."""
        values: dict[str, Any] = dict(metrics)
        if samples:
            rows = [{name: _shown(value) for name, value in row.items()} for row in samples]
            values[TABLE] = {"_type": "trackio.table", "_value": rows}
        entry = {
            "project": self._project,
            "run": self._run.run_id,
            "run_id": self._run.identity,
            "metrics": values,
            "step": step.number,
            "timestamp": _time(step),
            "config": self._config,
            "log_id": f"{self._run.identity}-{step.sequence}",
        }
        if self._server is not None:
            self._server.predict(api_name="/bulk_log", logs=[entry], hf_token=None)
            return
        self._storage.bulk_log(
            self._project,
            self._run.run_id,
            [values],
            steps=[step.number],
            timestamps=[_time(step)],
            config=self._config,
            log_ids=[entry["log_id"]],
            run_id=self._run.identity,
        )

    def alert(self, step: Step, kind: AlertKind, text: str) -> None:
        """Store an alert."""
        self._store_alert(step, TITLES[kind], text, "warn")

    def _store_alert(self, step: Step, title: str, text: str, level: str) -> None:
        entry = {
            "project": self._project,
            "run": self._run.run_id,
            "run_id": self._run.identity,
            "title": title,
            "text": text,
            "level": level,
            "step": step.number,
            "timestamp": _time(step),
            "alert_id": f"{self._run.identity}-{step.sequence}",
        }
        if self._server is not None:
            self._server.predict(api_name="/bulk_alert", alerts=[entry], hf_token=None)
            return
        self._storage.bulk_alert(
            self._project,
            self._run.run_id,
            [title],
            [text],
            [level],
            [step.number],
            timestamps=[_time(step)],
            alert_ids=[entry["alert_id"]],
            run_id=self._run.identity,
        )

    def change_state(self, step: Step, state: str, message: str) -> None:
        """Store the end of a run as an alert, because a run there has no state."""
        if state in LEVELS:
            self._store_alert(step, f"Run {state}", message or f"step {step.number}", LEVELS[state])

    def close(self) -> None:
        """Do nothing: all is stored."""


def _time(step: Step) -> str:
    return datetime.fromtimestamp(step.time_s, UTC).isoformat()


def _shown(value: Any) -> Any:
    """Return a cell as trackio shows it: texts of a table are Markdown there, so what a model wrote is escaped."""
    return html.escape(value, quote=False) if isinstance(value, str) else value

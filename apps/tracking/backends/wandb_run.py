"""Sends a run to Weights & Biases, online or to files on this machine that `wandb sync` sends later.

The step of W&B's history is the sequence number of the entry, because this step must grow and W&B ignores a repeated
step. The run's step is the x-axis (`train/global_step`). Sending resumes at the end of the history, which is read from
the server if online, else from the files.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.apps.tracking.tracker import TITLES, AlertKind, Row, Step, TrackedRun, Tracker, as_table, library
from paceline.spec.sections.system import TrackerSection

INIT_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 120.0
AXIS = "train/global_step"
SAMPLES = "samples"
WARNED = "paceline/warning"
MAX_ID = 64
log = logging.getLogger(__name__)


class WandbRun(Tracker):
    def __init__(self, setting: TrackerSection, run: TrackedRun, folder: Path):
        """Raises W&B's errors while its server cannot be reached."""
        self._wandb: Any = library("wandb")
        self._folder = folder / "wandb"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._offline_position = offline_position(self._folder) if setting.offline else None
        settings: dict[str, Any] = {
            "init_timeout": INIT_TIMEOUT_S,
            "console": "off",
            "disable_git": True,
            "save_code": False,
            "x_disable_stats": True,
            "x_disable_meta": True,
            "quiet": True,
        }
        if setting.url:
            settings["base_url"] = setting.url
        links = "\n".join(f"{name}: {text}" for name, text in run.links.items())
        self._run: Any = self._wandb.init(
            mode="offline" if setting.offline else "online",
            project=setting.project,
            name=run.run_id,
            id=run.identity[:MAX_ID],
            dir=str(self._folder),
            config=run.config,
            notes=links,
            resume=None if setting.offline else "allow",
            settings=self._wandb.Settings(**settings),
        )
        self.url = str(self._run.url or "")
        self._exit_code = 0
        self._run.define_metric(AXIS)
        self._run.define_metric("*", step_metric=AXIS)

    def position(self) -> int | None:
        if self._offline_position is not None:
            return self._offline_position
        return max(0, int(self._run.starting_step) - 1)

    def log(self, step: Step, metrics: Mapping[str, float], samples: Sequence[Row]) -> None:
        values: dict[str, Any] = {AXIS: step.number, **metrics}
        if samples:
            columns, lines = as_table(list(samples))
            values[SAMPLES] = self._wandb.Table(columns=columns, data=lines, allow_mixed_types=True)
        self._run.log(values, step=step.sequence)

    def alert(self, step: Step, kind: AlertKind, text: str) -> None:
        """Send an alert, which W&B delivers by mail or Slack, and a line of the history that shows that it was sent."""
        self._run.alert(title=TITLES[kind], text=f"step {step.number}: {text}", level=self._wandb.AlertLevel.WARN)
        self._run.log({AXIS: step.number, WARNED: 1}, step=step.sequence)

    def change_state(self, step: Step, state: str, message: str) -> None:
        self._exit_code = 1 if state == "failed" else 0

    def close(self) -> None:
        self._run.finish(exit_code=self._exit_code)


def offline_position(folder: Path) -> int:
    """Return the largest step in the history of W&B's files under `folder`, by W&B's reader; 0 without any."""
    newest = 0
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for record in read(path):
            newest = max(newest, int(record.get("history", {}).get("step", {}).get("num", 0)))
    return newest


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a .wandb file; of a truncated file, only the complete records."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=READ_TIMEOUT_S, check=False)
    if done.returncode:
        log.warning("%s can be read in part only: %s", path, done.stderr.strip()[-200:])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

"""Sends a run to an MLflow tracking server.

The server keeps one value for the same metric, step, time and value, so a repetition changes nothing. A tag identifies
the run, so a crash during its creation makes no second one. Each request has a short deadline; the caller retries it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.apps.tracking.tracker import AlertKind, Refused, Row, Step, TrackedRun, Tracker, as_table, library
from paceline.errors import InvalidInput
from paceline.spec.sections.system import TrackerSection

METRICS_AT_ONCE = 1000
PARAMETERS_AT_ONCE = 100
MAX_PARAMETER = 6000
MAX_TAG = 5000
IDENTITY = "paceline.identity"
STATUS = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
REFUSALS = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST"}
ALLOWED = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-. :/")


class MlflowRun(Tracker):
    def __init__(self, setting: TrackerSection, run: TrackedRun, timeout_s: int = 10):
        """Raises InvalidInput without a server, because MLflow no longer writes its folder of files."""
        address = setting.url or os.environ.get("MLFLOW_TRACKING_URI", "")
        if not address.startswith(("http://", "https://")):
            raise InvalidInput(
                f"MLflow's server is {address!r}; give the URL of a server, by `url` in logger.trackers, --url or "
                "MLFLOW_TRACKING_URI (`mlflow server --backend-store-uri sqlite:///mlflow.db` starts one)"
            )
        os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(timeout_s)
        os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
        library("mlflow")
        self._mlflow: Any = library("mlflow.entities")
        self._client: Any = library("mlflow.tracking").MlflowClient(tracking_uri=address)
        experiment_id = self._experiment(setting.project)
        self._run_id = self._found(experiment_id, run) or self._made(experiment_id, run)
        self.url = f"{address.rstrip('/')}/#/experiments/{experiment_id}/runs/{self._run_id}"
        self._send_parameters(run.config)

    def log(self, step: Step, metrics: Mapping[str, float], samples: Sequence[Row]) -> None:
        time_ms = int(step.time_s * 1000)
        values = [self._mlflow.Metric(_allowed(name), value, time_ms, step.number) for name, value in metrics.items()]
        for start in range(0, len(values), METRICS_AT_ONCE):
            chunk = values[start : start + METRICS_AT_ONCE]
            self._call(self._client.log_batch, self._run_id, metrics=chunk)
        if samples:
            columns, lines = as_table(list(samples))
            table = {"columns": columns, "data": lines}
            self._call(self._client.log_dict, self._run_id, table, f"samples/step-{step.number:08d}.json")

    def alert(self, step: Step, kind: AlertKind, text: str) -> None:
        """Set a tag of the run, because MLflow has no alerts."""
        words = f"step {step.number}: {text}"[:MAX_TAG]
        self._call(self._client.set_tag, self._run_id, f"paceline.{kind}.{step.sequence}", words)

    def change_state(self, step: Step, state: str, message: str) -> None:
        end_ms = int(step.time_s * 1000)
        if state in STATUS:
            self._call(self._client.set_terminated, self._run_id, STATUS[state], end_ms)
        else:
            self._call(self._client.update_run, self._run_id, status="RUNNING")

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def _found(self, experiment_id: str, run: TrackedRun) -> str:
        found = self._client.search_runs([experiment_id], f"tags.`{IDENTITY}` = '{run.identity}'", max_results=1)
        if not found:
            return ""
        return str(found[0].info.run_id)

    def _made(self, experiment_id: str, run: TrackedRun) -> str:
        tags = {IDENTITY: run.identity, "paceline.run": run.run_id}
        tags |= {f"paceline.{name}": text[:MAX_TAG] for name, text in run.links.items()}
        made = self._client.create_run(experiment_id, int(time.time() * 1000), tags, run.run_id)
        return str(made.info.run_id)

    def _send_parameters(self, config: Mapping[str, Any]) -> None:
        values = [
            self._mlflow.Param(_allowed(name), text[:MAX_PARAMETER]) for name, text in flat(config).items() if text
        ]
        for start in range(0, len(values), PARAMETERS_AT_ONCE):
            chunk = values[start : start + PARAMETERS_AT_ONCE]
            with contextlib.suppress(Refused):  # a resumed run's spec may differ, but parameters there cannot change
                self._call(self._client.log_batch, self._run_id, params=chunk)

    def _call(self, call: Any, *arguments: Any, **named: Any) -> None:
        try:
            call(*arguments, **named)
        except library("mlflow.exceptions").MlflowException as error:
            if error.error_code in REFUSALS:
                raise Refused(str(error)[:500]) from None
            raise


def flat(tree: Any, name: str = "") -> dict[str, str]:
    """Return a mapping from dotted name to value for the values of a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if items is None or not tree:
        return {name: str(tree)}
    return {
        key: value
        for part, branch in items
        for key, value in flat(branch, f"{name}.{part}" if name else str(part)).items()
    }


def _allowed(name: str) -> str:
    return "".join(each if each in ALLOWED else "_" for each in name)[:250]

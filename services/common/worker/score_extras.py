"""Carries the extras of score tasks and of their answers besides the rewards. Sums over calls and logged values are
gauges in a reward worker's heartbeats. Reward functions log columns by `log_extra`. The trainer's state is TRL's
`trainer_state`.

Promise: a step's numbers are over all calls and values that came with heartbeats since the step before, from any
worker. The columns are a line of `extra.jsonl` for each group, written when its scores are committed, encrypted with
the storage key if there is one. The ledger does not have them, so a line may be missing after a crash. The trainer's
state is sent as a column with a name that no argument of a function can have, so a data set's columns cannot collide
with it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.encryption.encrypted_file import WrongKey
from paceline.encryption.storage_key import storage_key
from paceline.files.line_file import LineReader
from paceline.reward.results import RewardResult
from paceline.reward.trainer_view import POOL_WORKERS
from paceline.spec import RewardFunctionSection, RunSpec

PREFIX = "fn/"
CALLS, SECONDS, FAILURES = "calls", "seconds", "failures"
ENDPOINT_METRICS = {
    "requests": "endpoint_requests",
    "failed": "endpoint_failed",
    "cached": "endpoint_cached",
    "no_verdict": "endpoint_no_verdict",
    "prompt_tokens": "endpoint_prompt_tokens",
    "completion_tokens": "endpoint_completion_tokens",
    "cost": "endpoint_cost",
}
"""Maps the name of a sum over requests to services (`paceline.reward.trainer_view.USAGE`) to a metric's name."""
MAX_SUMS = 256
"""Largest number of sums of one worker; further sums are left out."""


class FunctionSums:
    """Sums by kind and function, under the name `KIND/LABEL`."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, sums: Mapping[str, float]) -> None:
        for name, value in sums.items():
            if name in self._sums or len(self._sums) < MAX_SUMS:
                self._sums[name] = self._sums.get(name, 0.0) + value

    def add_result(self, functions: Sequence[RewardFunctionSection], result: RewardResult) -> None:
        """Add the calls of one group. `functions` are the run's functions; `result` may have only the first of them."""
        for function, duration_s in zip(functions, result.durations_s_F, strict=False):
            self.add({f"{CALLS}/{function.label}": 1.0, f"{SECONDS}/{function.label}": duration_s})
        if result.failure is not None:
            self.add({f"{FAILURES}/{result.failure.function}": 1.0})
        self.add(result.usage)

    def take(self) -> dict[str, float]:
        taken, self._sums = self._sums, {}
        return taken

    def take_gauges(self) -> dict[str, float]:
        """Return the sums as gauges of a heartbeat, and clear them."""
        return {f"{PREFIX}{name}": value for name, value in self.take().items()}

    def add_gauges(self, gauges: Mapping[str, float]) -> dict[str, float]:
        """Add the sums among a heartbeat's gauges; return the other gauges."""
        self.add({name.removeprefix(PREFIX): v for name, v in gauges.items() if name.startswith(PREFIX)})
        return {name: value for name, value in gauges.items() if not name.startswith(PREFIX)}

    def metrics(self) -> dict[str, float]:
        """Return mean seconds of a call (`score_s/LABEL`), `failed_calls/LABEL`, and sums like
        `endpoint_requests/LABEL`."""
        metrics: dict[str, float] = {}
        for name, value in self._sums.items():
            kind, _, label = name.partition("/")
            if kind == CALLS and value > 0:
                metrics[f"score_s/{label}"] = self._sums.get(f"{SECONDS}/{label}", 0.0) / value
                metrics[f"failed_calls/{label}"] = self._sums.get(f"{FAILURES}/{label}", 0.0)
            elif kind in ENDPOINT_METRICS:
                metrics[f"{ENDPOINT_METRICS[kind]}/{label}"] = value
        return metrics


SUM, COUNT = "logged_sum/", "logged_count/"
MAX_NAMES = 32
"""Largest number of names of logged values of one worker; further names are left out."""


class LoggedMetrics:
    """Sum and number of logged values, by name."""

    def __init__(self) -> None:
        self._metrics: dict[str, tuple[float, int]] = {}

    def add(self, metrics: Mapping[str, tuple[float, int]]) -> None:
        for name, (total, count) in metrics.items():
            if name in self._metrics or len(self._metrics) < MAX_NAMES:
                before = self._metrics.get(name, (0.0, 0))
                self._metrics[name] = (before[0] + total, before[1] + count)

    def take(self) -> dict[str, tuple[float, int]]:
        taken, self._metrics = self._metrics, {}
        return taken

    def take_gauges(self) -> dict[str, float]:
        """Return the sums and numbers as gauges of a heartbeat, and clear them."""
        taken = self.take().items()
        sums = {f"{SUM}{name}": total for name, (total, _) in taken}
        return sums | {f"{COUNT}{name}": float(count) for name, (_, count) in taken}

    def add_gauges(self, gauges: Mapping[str, float]) -> dict[str, float]:
        """Add the sums and numbers among a heartbeat's gauges; return the other gauges."""
        for gauge, total in gauges.items():
            name = gauge.removeprefix(SUM)
            count = gauges.get(f"{COUNT}{name}", 0.0)
            if gauge.startswith(SUM) and count >= 1:
                self.add({name: (total, int(count))})
        return {gauge: value for gauge, value in gauges.items() if not gauge.startswith((SUM, COUNT))}

    def means(self) -> dict[str, float]:
        """Return `logged/NAME` for each name: the mean of its values."""
        return {f"logged/{name}": total / count for name, (total, count) in self._metrics.items()}


EXTRA_NAME = "extra.jsonl"
MAX_BYTES = 256 << 10
"""Largest number of characters of one group's columns on the wire."""


def extra_json(columns: Mapping[str, list[Any]]) -> str:
    """Return the columns as a JSON object, without the last ones beyond MAX_BYTES; empty without columns."""
    kept = dict(columns)
    while kept:
        text = json.dumps(kept)
        if len(text) <= MAX_BYTES:
            return text
        kept.popitem()
    return ""


def extra_line(group_id: int, digest: str, text: str, num_completions: int) -> str:
    """Return a group's line of extra.jsonl; `digest` is that of the group's text. The line is empty unless `text` has
    at most MAX_BYTES characters and is a JSON object of lists with one value a completion."""
    if not text or len(text) > MAX_BYTES:
        return ""
    try:
        columns = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(columns, dict) or not all(
        isinstance(values, list) and len(values) == num_completions for values in columns.values()
    ):
        return ""
    return json.dumps({"group_id": group_id, "digest": digest, "extra": columns}) + "\n"


def read_extra(folder: Path, digests: Collection[str]) -> dict[str, dict[str, list[Any]]]:
    """Return the columns of groups by the digest of the group's text, each from its newest line; unreadable lines are
    left out. Raises WrongKey for a file that is encrypted with another storage key than this process has."""
    columns: dict[str, dict[str, list[Any]]] = {}
    try:
        lines = LineReader(folder / EXTRA_NAME, storage_key())
    except OSError:
        return columns
    with lines:
        for start, _, line in lines.stored():
            try:
                row = json.loads(lines.opened(line, start).decode(errors="replace"))
            except (ValueError, RecursionError, WrongKey):
                continue
            if isinstance(row, dict) and row.get("digest") in digests and isinstance(row.get("extra"), dict):
                columns[row["digest"]] = row["extra"]
    return columns


TRAINER_STATE = "paceline.trainer_state"


def trainer_state(spec: RunSpec, trained_steps: int, num_rows: int, reward_workers: int = 1) -> dict[str, Any]:
    """Return the trainer's state: steps trained, steps of the run, epochs trained, and the number of reward workers, by
    which each reward worker divides the limits of services. User functions do not see this number."""
    prompts = trained_steps * spec.grpo.num_prompts_per_step
    return {
        "global_step": trained_steps,
        "max_steps": spec.max_num_steps,
        "epoch": prompts / num_rows if num_rows else 0.0,
        POOL_WORKERS: max(1, reward_workers),
    }


def with_trainer_state(columns_json: str, state: dict[str, Any]) -> str:
    """Return a group's columns, a JSON object, with the trainer's state added."""
    if not columns_json.startswith("{"):
        return columns_json  # damaged columns, which the worker reports
    inside = columns_json.strip()[1:-1].strip()
    return f'{{{inside}{", " if inside else ""}"{TRAINER_STATE}": {json.dumps(state)}}}'

"""Calls, seconds and failures of each reward function: sums that travel with a reward worker's heartbeats as gauges.

Promise: the numbers of a step are over all calls that came with heartbeats since the step before, whatever the worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.reward.results import RewardResult
from paceline.spec import RewardFunctionSection

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
"""Metrics of the sums of requests to services (`paceline.reward.trainer_view.USAGE`)."""
MAX_SUMS = 256
"""Sums of one worker; further ones are left out."""


class FunctionSums:
    """Sums by kind and function, under the name `KIND/LABEL`."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, sums: Mapping[str, float]) -> None:
        """Add sums by name."""
        for name, value in sums.items():
            if name in self._sums or len(self._sums) < MAX_SUMS:
                self._sums[name] = self._sums.get(name, 0.0) + value

    def add_result(self, functions: Sequence[RewardFunctionSection], result: RewardResult) -> None:
        """Add the calls of one group; `functions` are those of the run, of which the first ones ran."""
        for function, duration_s in zip(functions, result.durations_s_F, strict=False):
            self.add({f"{CALLS}/{function.label}": 1.0, f"{SECONDS}/{function.label}": duration_s})
        if result.failure is not None:
            self.add({f"{FAILURES}/{result.failure.function}": 1.0})
        self.add(result.usage)

    def take(self) -> dict[str, float]:
        """Return the sums by name, and begin anew."""
        taken, self._sums = self._sums, {}
        return taken

    def take_gauges(self) -> dict[str, float]:
        """Return them as gauges of a heartbeat, and begin anew."""
        return {f"{PREFIX}{name}": value for name, value in self.take().items()}

    def add_gauges(self, gauges: Mapping[str, float]) -> dict[str, float]:
        """Add the sums among a heartbeat's gauges; return the other gauges."""
        self.add({name.removeprefix(PREFIX): v for name, v in gauges.items() if name.startswith(PREFIX)})
        return {name: value for name, value in gauges.items() if not name.startswith(PREFIX)}

    def metrics(self) -> dict[str, float]:
        """Return `score_s/LABEL`, the mean seconds of a call, `failed_calls/LABEL`, and the sums of requests to services:
        `endpoint_requests/LABEL` and others."""
        found: dict[str, float] = {}
        for name, value in self._sums.items():
            kind, _, label = name.partition("/")
            if kind == CALLS and value > 0:
                found[f"score_s/{label}"] = self._sums.get(f"{SECONDS}/{label}", 0.0) / value
                found[f"failed_calls/{label}"] = self._sums.get(f"{FAILURES}/{label}", 0.0)
            elif kind in ENDPOINT_METRICS:
                found[f"{ENDPOINT_METRICS[kind]}/{label}"] = value
        return found

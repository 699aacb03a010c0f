"""A coordinator that a sweep's trials run at without services: their value follows from their spec."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from paceline.apps.sweeps.study import SweepStudy
from paceline.apps.sweeps.sweep import Trials
from paceline.apps.sweeps.sweep_file import Sweep
from paceline.client import Event
from paceline.errors import Conflict
from paceline.spec import RunSpec
from paceline.spec.reading import spec_to_yaml
from paceline.v1 import run_pb2

SPEC = {
    "policy": {"model_name": "tiny"},
    "data": {"train": "train.jsonl", "validation": "held.jsonl"},
    "rewards": [{"function": "exact_match"}],
    "grpo": {"max_num_steps": 4, "val_at_end": True},
}
LR = {"policy.optimizer.lr": {"low": 1e-5, "high": 1e-2, "log": True}}
BAD = {"policy.optimizer.lr": 1e-5}
STEPS = 4
STATES = {"succeeded": run_pb2.RUN_STATE_SUCCEEDED, "failed": run_pb2.RUN_STATE_FAILED,
          "cancelled": run_pb2.RUN_STATE_CANCELLED, "paused": run_pb2.RUN_STATE_PAUSED,
          "running": run_pb2.RUN_STATE_RUNNING}  # fmt: skip


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the sweep may catch it."""


def quality(spec: RunSpec) -> float:
    """The best learning rate is 1e-3."""
    return 1.0 - abs(math.log10(spec.policy.optimizer.lr) + 3) / 4


@dataclass
class SweepCoordinator:
    """Records what it was asked. `fails` gives the message with which a run of a spec pauses or fails."""

    fails: Callable[[RunSpec], tuple[str, str] | None] = lambda _: None
    killed_after: str = ""
    """`submit`, or `watch` in its middle: there the caller dies."""
    specs: dict[str, RunSpec] = field(default_factory=dict)
    states: dict[str, tuple[str, str]] = field(default_factory=dict)
    submitted: list[str] = field(default_factory=list)
    watched: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def submit(self, spec: RunSpec) -> Any:
        run_id = f"{spec.name}-{len(self.specs) + 1}"
        self.specs[run_id], self.states[run_id] = spec, ("running", "")
        self.submitted.append(run_id)
        if self.killed_after == "submit":
            raise Killed
        return self.get(run_id)

    def runs(self) -> list[Any]:
        """Without specs, as a coordinator lists them."""
        return [run_pb2.Run(run_id=run_id, state=STATES[state]) for run_id, (state, _) in self.states.items()]

    def get(self, run_id: str) -> Any:
        state, message = self.states[run_id]
        return run_pb2.Run(
            run_id=run_id, state=STATES[state], message=message, spec_yaml=spec_to_yaml(self.specs[run_id])
        )

    def watch(self, run_id: str) -> Iterator[Event]:
        self.watched.append(run_id)
        spec = self.specs[run_id]
        for step in range(STEPS):
            if self.killed_after == "watch" and step == 2:
                raise Killed
            yield Event(2 * step, "step", {"step": step, "reward": quality(spec) * (step + 1) / STEPS})
            yield Event(2 * step + 1, "evaluation", {"step": step, "reward": quality(spec) * (step + 1) / STEPS})
            if self.states[run_id][0] == "cancelled":
                return
            if step == 1 and (fault := self.fails(spec)):
                self.states[run_id] = fault
                yield Event(100, "state", {"state": fault[0], "message": fault[1]})
                if fault[0] == "failed":
                    return
        self.states[run_id] = ("succeeded", "")

    def cancel(self, run_id: str) -> Any:
        if self.states[run_id][0] == "succeeded":
            raise Conflict(f"run {run_id} has ended")
        self.states[run_id] = ("cancelled", "")
        self.cancelled.append(run_id)
        return self.get(run_id)


def sweep_of(**settings: Any) -> Sweep:
    """A sweep over the learning rate that begins with a bad one."""
    return Sweep.model_validate({"name": "lr", "trials": 6, "search": LR, "start": [BAD]} | settings)


def trials(folder: Path, coordinator: SweepCoordinator, sweep: Sweep, said: list[str] | None = None) -> Trials:
    """The trials of a sweep with its study in `folder`/lr, as a new process opens it."""
    (folder / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    say = (said if said is not None else []).append
    return Trials(SweepStudy(folder / "lr", sweep), coordinator, str(folder / "spec.yaml"), (), say)

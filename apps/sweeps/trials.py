"""Trials one after the other, each an ordinary run of the coordinator.

Promise: a trial has one run. Its name is on record before it is submitted, so a process that goes on after it was killed looks
for that name, follows the run that is there, and submits only where there is none. A trial that is pruned has its run cancelled;
one whose run fails, or pauses for a fault, is told as failed, and the sweep goes on.
"""

from __future__ import annotations

import contextlib
import re
import statistics
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from paceline.apps.sweeps.study import SweepStudy, Trial
from paceline.apps.sweeps.sweep_file import overrides_of
from paceline.client import Event
from paceline.errors import Conflict
from paceline.services.cli import render
from paceline.services.cli.running.watching import advice, in_front_of
from paceline.spec.reading import load_spec


class Coordinator(Protocol):
    """What a sweep asks of a coordinator; paceline.client.Client has it."""

    def submit(self, spec: Any) -> Any:
        """Queue a run."""

    def runs(self) -> list[Any]:
        """Return all runs."""

    def get(self, run_id: str) -> Any:
        """Return a run."""

    def watch(self, run_id: str) -> Iterator[Event]:
        """Events of a run until it has ended."""

    def cancel(self, run_id: str) -> Any:
        """End a run."""


class Trials:
    """Runs the trials of a study until there are as many as the sweep wants."""

    def __init__(
        self,
        study: SweepStudy,
        coordinator: Coordinator,
        spec: str,
        overrides: tuple[str, ...],
        say: Callable[[str], None],
    ):
        """`spec` is the file that the trials change; `say` gets a line for each beginning and outcome."""
        self._study, self._coordinator = study, coordinator
        self._spec, self._overrides, self._say = spec, overrides, say
        self._sweep = study.sweep

    def run(self) -> None:
        """Go on with open trials, then begin others. Raises Unavailable when the coordinator is gone for good."""
        for trial in self._study.open_trials():
            self._run(trial)
        while self._study.num_ended() < self._sweep.trials:
            self._run(self._study.ask())

    def _run(self, trial: Trial) -> None:
        values = ", ".join(f"{key}={_short(value)}" for key, value in trial.values.items())
        run_id = trial.run_id or self._found(trial)
        if run_id:
            self._say(f"trial {trial.number} goes on as {run_id}: {values}")
        else:
            name = self._study.run_name(trial.number)
            spec = load_spec(self._spec, (*self._overrides, *overrides_of(trial.values), f"name={name}"))
            run_id = str(self._coordinator.submit(spec).run_id)
            self._say(f"trial {trial.number} is {run_id}: {values}")
        trial.set_run(run_id)
        if (ahead := in_front_of(self._coordinator, run_id)) is not None:
            self._say(advice(run_id, ahead))
        self._say(f"trial {trial.number}: {self._follow(trial, run_id)}")

    def _found(self, trial: Trial) -> str:
        """Return the run of a trial whose process was killed between submitting it and recording that."""
        named = re.compile(
            re.escape(self._study.run_name(trial.number)) + r"-\d+"
        )  # an id is the name and a number
        return next((str(run.run_id) for run in self._coordinator.runs() if named.fullmatch(run.run_id)), "")

    def _follow(self, trial: Trial, run_id: str) -> str:
        """Follow a run to its outcome, tell it, and return it in words."""
        measured: list[float] = []
        for event in self._coordinator.watch(run_id):
            if (value := self._value(event)) is not None:
                measured.append(value)
                if trial.report(int(event.content.get("step", len(measured))), value):
                    self._cancel(run_id)
                    trial.prune()
                    return f"pruned at step {event.content.get('step')} with {self._sweep.metric} {value:.4g}"
            if (
                event.kind == "state"
                and event.content.get("state") == "paused"
                and self._is_stuck(run_id, event)
            ):
                message = str(event.content.get("message", ""))
                self._cancel(run_id)
                trial.fail(message)
                return f"failed, because its run paused: {message}"
        facts = render.run_facts(self._coordinator.get(run_id))
        if facts["state"] != "succeeded":
            trial.fail(facts["message"] or facts["state"])
            return f"failed: its run is {facts['state']}{': ' if facts['message'] else ''}{facts['message']}"
        if not measured:
            trial.fail(f"no {self._sweep.metric!r} in any {self._sweep.of}")
            return f"failed: no event of kind {self._sweep.of!r} had a number {self._sweep.metric!r}"
        value = (
            measured[-1]
            if self._sweep.of == "evaluation"
            else statistics.fmean(measured[-self._sweep.last_steps :])
        )
        trial.complete(value)
        return f"{self._sweep.metric} {value:.4g}"

    def _value(self, event: Event) -> float | None:
        value = event.content.get(self._sweep.metric) if event.kind == self._sweep.of else None
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def _is_stuck(self, run_id: str, event: Event) -> bool:
        """Return whether a run is paused for a fault: a pause by a person has no message, and may end as a retried one may."""
        if event.content.get("retried"):
            return False
        facts = render.run_facts(self._coordinator.get(run_id))
        return facts["state"] == "paused" and bool(facts["message"])

    def _cancel(self, run_id: str) -> None:
        with contextlib.suppress(Conflict):  # it has ended meanwhile
            self._coordinator.cancel(run_id)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""State of the coordinator as OpenTelemetry gauges: members, runs, the age of the newest step, the disk.

They are what alerts need between two steps, and are named `paceline.coordinator.<metric>`. `observe` takes a snapshot in the
event loop every few seconds; a collector's thread reads the last snapshot alone, so it touches neither ledger nor members. A
gauge of a run exists only while the run is active.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Meter, Observation

from paceline.host.memory import process_gauges
from paceline.rate_limited_log import unforeseen
from paceline.services.coordinator.exchange.state import Exchange
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.members.registry import ROLE_NAMES, Members

OBSERVE_S = 5.0
"""Seconds between two snapshots."""
RUN_STATES = ("queued", "running", "paused", "succeeded", "failed", "cancelled")
GAUGES = (
    "members",
    "needed",
    "suspected",
    "unable",
    "runs",
    "step_age_s",
    "paused_s",
    "disk_free_bytes",
    "admission_closed",
    "unforeseen_errors",
    "insecure",
    "memory_gb",
)
Snapshot = dict[str, list[Observation]]


class StateMeters:
    """Gauges of `meter`; by default of the process's provider, which does nothing where none is set up."""

    def __init__(
        self,
        ledger: Ledger,
        exchange: Exchange,
        members: Members,
        directory: Path,
        meter: Meter | None = None,
        *,
        is_insecure: bool = False,
    ) -> None:
        self._ledger, self._exchange, self._members = ledger, exchange, members
        self._directory = directory
        self._is_insecure = is_insecure
        self._snapshot: Snapshot = {}
        self._observed_s: float | None = None
        self._moved: tuple[tuple[str, str, int], float] | None = None
        """Run, its state and its next step, and since when they are so."""
        meter = meter or metrics.get_meter("paceline")
        for name in GAUGES:
            meter.create_observable_gauge(f"paceline.coordinator.{name}", callbacks=[self._reader(name)])

    def observe(self, now_s: float) -> None:
        """Take a snapshot if the last one is older than OBSERVE_S. `now_s` is of a monotonic clock."""
        if self._observed_s is not None and now_s - self._observed_s < OBSERVE_S:
            return
        self._observed_s = now_s
        self._snapshot = self._pools() | self._runs(now_s) | self._process()

    def _pools(self) -> Snapshot:
        found: Snapshot = {"members": [], "needed": [], "suspected": [], "unable": []}
        needed = self._needed()
        for role, pool in ROLE_NAMES.items():
            about = {"pool": pool}
            present = self._members.of_role(role)
            found["members"].append(Observation(sum(m.connected for m in present), about))
            found["needed"].append(Observation(int(pool in needed), about))
            found["suspected"].append(Observation(sum(m.suspected for m in present), about))
            found["unable"].append(Observation(sum(m.fault is not None for m in present), about))
        return found

    def _needed(self) -> set[str]:
        """Return the pools without which the active run makes no steps."""
        run = self._exchange.active
        if run is None:
            return set()
        if run.prompts is None:  # it trains on examples
            return {"learner"}
        needed = {"learner", "rollout"}
        if run.spec.rewards:
            needed.add("reward")
        if run.spec.environment is not None:
            needed.add("environment")
        return needed

    def _runs(self, now_s: float) -> Snapshot:
        counts = self._ledger.runs_by_state()
        found: Snapshot = {
            "runs": [Observation(counts.get(state, 0), {"state": state}) for state in RUN_STATES],
            "admission_closed": [Observation(int(bool(self._exchange.admission_closed)))],
        }
        row = self._ledger.active_run()
        if row is None:
            self._moved = None
            return found
        facts = (str(row["run_id"]), str(row["state"]), int(row["next_step"]))
        if self._moved is None or self._moved[0] != facts:
            self._moved = facts, now_s
        name = "paused_s" if facts[1] == "paused" else "step_age_s"
        found[name] = [Observation(now_s - self._moved[1], {"paceline.run": facts[0]})]
        return found

    def _process(self) -> Snapshot:
        return {
            "disk_free_bytes": [Observation(shutil.disk_usage(self._directory).free)],
            "unforeseen_errors": [Observation(unforeseen.total)],
            "insecure": [Observation(int(self._is_insecure))],
            "memory_gb": [Observation(value) for value in [process_gauges().get("memory_gb")] if value],
        }

    def _reader(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda _options: self._snapshot.get(name, [])

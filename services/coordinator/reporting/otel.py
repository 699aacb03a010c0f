"""The coordinator's OpenTelemetry metrics: its own state, trained steps, and costs of published versions.

`StateMeters`: gauges `paceline.coordinator.<metric>`, which alerts need between two steps. `observe` takes a snapshot
in the event loop every few seconds; a collector's thread reads only the last snapshot, so it touches neither ledger nor
members. A gauge of a run exists only while the run is active.

`WeightMeters`: `paceline.weights.*`, the numbers of metrics.jsonl's `weights` lines. Seconds and bytes are histograms
with one value for each version (that of the slowest member); epoch, version and members are gauges with the newest
value.

`StepMeters`: gauges `paceline.train.<metric>` and `paceline.eval.<metric>`, the numbers of metrics.jsonl of the newest
step, which `paceline.train.step` and `paceline.eval.step` name. The gauges of `StepMeters` and the metrics of
`WeightMeters` have the attribute `paceline.run`.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Meter, Observation

from paceline.host.resources import process_gauges
from paceline.rate_limited_log import unforeseen
from paceline.services.coordinator.exchange.state import Exchange
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.members.registry import ROLE_NAMES, Members
from paceline.services.coordinator.reporting.weight_metrics import VersionRecord

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
    """Gauges of the coordinator's state. They are made by `meter` or, if it is None, by the process's provider, which
    does nothing if it is not set up."""

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
        """The run with its state and its next step, and the time since which they have not changed."""
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
        run = self._exchange.active
        if run is None:
            return set()
        if run.prompts is None:  # the run trains on examples
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


SECONDS = {
    "gather_s": "Time in which the learner's ranks gathered a bucket",
    "wait_s": "Time for which the learner's next step waited for the copy of the weights",
    "transfer_s": "Time in which the buckets were sent",
    "answer_s": "Time from the last bucket to the member's acknowledgement",
    "publish_s": "Time from the offer to the acknowledgement",
    "host_s": "Time until a host had verified all bytes",
    "hop_s": "Time in which a host received bytes, without its waits for the previous host",
    "swap_s": "Time in which the engine swapped its weights",
    "pause_s": "Pause of the sampler",
}
"""Instruments. The key is the name in `VersionRecord.numbers`; the instrument's name has no suffix for the unit."""
SECONDS_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
BYTES_BOUNDS = tuple(float(4**power) for power in range(5, 20))
"""Bounds of histograms in bytes, from 1 KiB to 256 GiB."""


class WeightMeters:
    """Instruments for published versions, made as those of `StateMeters`."""

    def __init__(self, meter: Meter | None = None) -> None:
        meter = meter or metrics.get_meter("paceline")
        self._seconds = {
            name: meter.create_histogram(
                f"paceline.weights.{name.removesuffix('_s')}",
                unit="s",
                description=description,
                explicit_bucket_boundaries_advisory=SECONDS_BOUNDS,
            )
            for name, description in SECONDS.items()
        }
        self._bytes = meter.create_histogram(
            "paceline.weights.size",
            unit="By",
            description="Bytes sent to each member",
            explicit_bucket_boundaries_advisory=BYTES_BOUNDS,
        )
        self._gauges = {
            name: meter.create_gauge(f"paceline.weights.{name}", description=description)
            for name, description in {
                "version": "Newest step whose weights were published",
                "epoch": "Number of the roster for which the version was published",
                "members": "Members of the roster",
                "acknowledged": "Members that acknowledged the version",
            }.items()
        }
        self._failures = meter.create_counter(
            "paceline.weights.failures", description="Failed attempts to send a version to a member"
        )

    def record(self, run_id: str, record: VersionRecord) -> None:
        about = {"paceline.run": run_id}
        numbers = record.metrics() | {"version": float(record.version.step)}
        for name, histogram in self._seconds.items():
            if name in numbers:
                histogram.record(numbers[name], about)
        if "size_bytes" in numbers:
            self._bytes.record(numbers["size_bytes"], about)
        for name, gauge in self._gauges.items():
            gauge.set(numbers[name], about)
        self._failures.add(numbers.get("failures", 0.0), about)


MAX_GAUGES = 512
"""Largest number of gauges of one process, because users name the reward functions and the values that these log."""
MAX_NAME = 200


class StepMeters:
    """Gauges of the newest step, made as those of `StateMeters`."""

    def __init__(self, meter: Meter | None = None, max_gauges: int = MAX_GAUGES) -> None:
        self._meter, self._max_gauges = meter or metrics.get_meter("paceline"), max_gauges
        self._gauges: dict[str, metrics._Gauge] = {}

    def record(self, run_id: str, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        """Record the finite numbers of a step (`train`) or an evaluation (`eval`)."""
        for name, value in {**numbers, "step": float(step)}.items():
            gauge = self._gauge(f"paceline.{kind}.{name}")
            if gauge is not None and math.isfinite(value):
                gauge.set(value, {"paceline.run": run_id})

    def _gauge(self, name: str) -> metrics._Gauge | None:
        """Return the gauge of a name, with characters that OpenTelemetry allows; None beyond the limit."""
        name = re.sub(r"[^A-Za-z0-9_./-]", "_", name)[:MAX_NAME]
        if name not in self._gauges and len(self._gauges) < self._max_gauges:
            self._gauges[name] = self._meter.create_gauge(name)
        return self._gauges.get(name)

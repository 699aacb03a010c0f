"""Measures members, their room, their results and the learner's steps between two decisions on the sizes of pools.
`tick` is called several times a second and adds up; `take` ends a period. `measure` turns a period into the policy's
input for one pool. Workers report the occupied share of their room with each heartbeat; results are counted when
they are committed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.services.coordinator.exchange.notices import Notice
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.members.registry import Member, Members
from paceline.services.coordinator.scaling.policy import Measurement, PoolConfig

LEARNER_STEP = "step_s"
"""Metric of a learner's receipt that has the seconds of the step."""

NOT_WORK = frozenset({"groups:dropped:run_ended", "groups:dropped:by_request"})
"""Counters of dropped groups that no step needed."""

HALF_LIFE_STEPS = 8.0
"""Number of further steps after which a wait of the learner has half of its weight."""


@dataclass(frozen=True)
class Worker:
    role: str
    is_ready: bool
    """True if the worker takes work at the end of the period."""
    ready_s: float = 0.0
    """Seconds of the period in which the worker took work."""
    occupied_s: float = 0.0
    """Seconds: `ready_s`, weighted by the occupied share of the worker's room."""
    completed: float = 0.0
    held: int = 0


@dataclass(frozen=True)
class Period:
    seconds: float
    roles: frozenset[str]
    """Roles that the run needs; empty without a run that trains."""
    workers: dict[str, Worker] = field(default_factory=dict)
    steps: int = 0
    step_s: float = 0.0
    """Mean seconds of a step without the wait for its batch."""
    groups_per_step: float = 0.0
    holder: str = "rollout"
    """Role of the workers that hold leases and submit groups."""

    def of_pool(self, pool: PoolConfig) -> dict[str, Worker]:
        return {name: worker for name, worker in self.workers.items() if pool.has(worker.role, name)}


def measure(period: Period, pool: PoolConfig, share: float) -> Measurement:
    """Return a period's measurement of one pool. In a run with an environment, rollout workers sample the turns
    of groups that environment workers submit. A rollout worker is credited with a part of these groups, in proportion
    to its occupied room."""
    workers = period.of_pool(pool)
    ready_s = sum(worker.ready_s for worker in workers.values())
    occupied_s = sum(worker.occupied_s for worker in workers.values())
    completed, held = sum(w.completed for w in workers.values()), float(sum(w.held for w in workers.values()))
    if pool.role == "rollout" and period.holder != "rollout":
        everywhere_s = sum(w.occupied_s for w in period.workers.values() if w.role == "rollout")
        part = occupied_s / everywhere_s if everywhere_s else 0.0
        completed = part * sum(w.completed for w in period.workers.values() if w.role == period.holder)
        held = part * sum(w.held for w in period.workers.values() if w.role == period.holder)
    ready = sum(worker.is_ready for worker in workers.values())
    if not ready_s:
        completed, held = 0.0, 0.0
    return Measurement(
        seconds=period.seconds,
        has_run=pool.role in period.roles,
        ready=ready,
        starting=len(workers) - ready,
        completed=completed,
        held=held,
        # `decide` multiplies by the present workers; workers that came or left within the period count for their part
        # of it.
        occupied=occupied_s / (period.seconds * ready) if ready and period.seconds else 0.0,
        steps=period.steps,
        step_s=period.step_s,
        groups_per_step=period.groups_per_step,
        share=share,
    )


class StepTimes:
    """Steps of the learner: those of a period, and the share of all recent time in which the learner waited."""

    def __init__(self) -> None:
        self.number, self.seconds, self.groups = 0, 0.0, 0.0
        """Steps of the period, their seconds without waits, and the groups that they needed."""
        self.reported_s = 0.0
        """Seconds of the last step by the learner's own metric."""
        self._last: tuple[str, int, float] | None = None
        """Run id, session and time of the last trained step."""
        self._dropped: tuple[str, int] | None = None
        """Run, and the number of groups that it had dropped when its last step was counted."""
        self._waited_s = self._passed_s = 0.0
        """Seconds of the learner's waits, and of its steps including the waits; older ones have less weight."""

    def add(self, run: ActiveRun, session: int, dropped: int, wait_s: float, now_s: float) -> None:
        """Count a step that was trained at `now_s`; by then the run has dropped `dropped` groups."""
        before, self._last = self._last, (run.run_id, session, now_s)
        dropped_before, self._dropped = self._dropped, (run.run_id, dropped)
        train_s = self.reported_s
        if before is not None and before[:2] == (run.run_id, session):
            # This includes publishing and checkpoints, which the learner's own metric leaves out.
            train_s = max(train_s, now_s - before[2] - wait_s)
        if train_s <= 0:
            return
        self.number += 1
        self.seconds += train_s
        self.groups += run.batch_size
        if dropped_before is not None and dropped_before[0] == run.run_id:
            self.groups += max(0, dropped - dropped_before[1])
        kept = 0.5 ** (1 / HALF_LIFE_STEPS)
        self._waited_s = kept * self._waited_s + wait_s
        self._passed_s = kept * self._passed_s + wait_s + train_s

    def begin_period(self) -> None:
        self.number, self.seconds, self.groups = 0, 0.0, 0.0

    def wait_fraction(self, waiting_s: float) -> float:
        """Return the share of the time in which the learner waited, with its current wait of `waiting_s` seconds."""
        passed_s = self._passed_s + waiting_s
        return min(1.0, (self._waited_s + waiting_s) / passed_s) if passed_s else 0.0


class Meter:
    """Counts of one coordinator; after a restart they begin anew."""

    def __init__(self, ledger: Ledger, exchange: Exchange, members: Members, now_s: float):
        self._ledger, self._exchange, self._members = ledger, exchange, members
        self._ticked_s = self._began_s = now_s
        self._ready_s: dict[str, float] = {}
        self._occupied_s: dict[str, float] = {}
        self._completed: dict[str, float] = {}
        """Number of groups that each worker had completed when the period began."""
        self._steps = StepTimes()

    def note(self, notices: Iterable[Notice], now_s: float) -> None:
        """Count the trained steps among the exchange's notices."""
        for notice in notices:
            if notice.kind == "metrics":
                self._steps.reported_s = float(notice.content["metrics"].get(LEARNER_STEP, 0.0))
            elif notice.kind == "step":
                self._count_step(notice, now_s)

    def tick(self, now_s: float) -> None:
        """Add the time since the last call to each worker that takes work."""
        elapsed_s, self._ticked_s = max(0.0, now_s - self._ticked_s), now_s
        run = self.running()
        if run is None:
            return
        for member in self._members.all():
            if takes_work(member, run):
                name = member.member_id
                self._ready_s[name] = self._ready_s.get(name, 0.0) + elapsed_s
                # A worker that has not reported yet counts as fully occupied.
                occupied = min(max(member.measures.gauges.get("occupied", 1.0), 0.0), 1.0)
                self._occupied_s[name] = self._occupied_s.get(name, 0.0) + elapsed_s * occupied

    def take(self, now_s: float) -> Period:
        self.tick(now_s)
        run = self.running()
        roles, holder = frozenset[str](), "rollout"
        if run is not None:
            with_environment = run.spec.environment.is_used
            roles = frozenset({"rollout", "reward", *(["environment"] if with_environment else [])})
            holder = "environment" if with_environment else "rollout"
        throughput, held = self._exchange.workers.throughput, self._ledger.group_queries.num_held()
        completed = {**throughput.generated, **throughput.scored}
        workers, steps = {}, self._steps
        for member in self._members.all():
            if member.role_name == "learner" or member.draining or not member.connected:
                continue
            name = member.member_id
            workers[name] = Worker(
                role=member.role_name,
                is_ready=run is not None and takes_work(member, run),
                ready_s=self._ready_s.get(name, 0.0),
                occupied_s=self._occupied_s.get(name, 0.0),
                completed=completed.get(name, 0.0) - self._completed.get(name, 0.0),
                held=held.get(name, 0),
            )
        period = Period(
            seconds=now_s - self._began_s,
            roles=roles,
            workers=workers,
            steps=steps.number,
            step_s=steps.seconds / steps.number if steps.number else 0.0,
            groups_per_step=steps.groups / steps.number if steps.number else 0.0,
            holder=holder,
        )
        throughput.keep(member.member_id for member in self._members.all())
        self._began_s, self._completed = now_s, completed
        self._ready_s, self._occupied_s = {}, {}
        steps.begin_period()
        return period

    def running(self) -> ActiveRun | None:
        """Return the run that trains on groups now; None if it is paused, or trains on a data set's examples."""
        run = self._exchange.active
        if run is None or run.prompts is None or self._ledger.run(run.run_id)["state"] != "running":
            return None
        return run

    def wait_fraction(self, now_s: float) -> float:
        """Return the share of the learner's time in which it waited for its batch, with its current wait."""
        run, waiting_s = self.running(), 0.0
        if run is not None:
            row = self._ledger.run(run.run_id)
            requested_s = run.state.first_requested_s.get(row["next_batch"])
            if requested_s is not None and row["next_batch"] <= row["next_step"]:
                waiting_s = max(0.0, now_s - requested_s)
        return self._steps.wait_fraction(waiting_s)

    def _count_step(self, notice: Notice, now_s: float) -> None:
        run = self._exchange.active
        if run is None or run.prompts is None or run.run_id != notice.run_id:
            return
        session = int(self._ledger.run(run.run_id)["session"])
        wait_s = max(0.0, float(notice.content["metrics"].get("learner_wait_s", 0.0)))
        self._steps.add(run, session, self._num_dropped(run.run_id), wait_s, now_s)

    def _num_dropped(self, run_id: str) -> int:
        counters = self._ledger.counters(run_id)
        return sum(
            number for name, number in counters.items() if name.startswith("groups:dropped:") and name not in NOT_WORK
        )


def takes_work(member: Member, run: ActiveRun) -> bool:
    """Return whether a worker has set the run up and takes its work."""
    return (
        member.connected
        and not member.suspected
        and not member.draining
        and member.role_name != "learner"
        and member.ready_run == run.run_id
    )

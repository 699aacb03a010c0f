"""The watchdog of a training run: it explains stalls, and closes admission before the disk is full. The coordinator
calls it at every tick and records its warnings. It changes the exchange only by `Exchange.close_admission`. Reasons of
a stall are checked in the order of the stages of a group; the first one that applies explains the stall, because it
blocks all later stages."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import counted
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange
from paceline.services.coordinator.ledger.groups import State
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.members.registry import Member, Members
from paceline.v1 import common_pb2


class Watchdog:
    """Watchdog of one coordinator. It remembers how long the run has been in its state; a restart resets that."""

    def __init__(
        self,
        ledger: Ledger,
        exchange: Exchange,
        members: Members,
        directory: Path,
        min_free_bytes: int,
        free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    ):
        self._ledger = ledger
        self._exchange = exchange
        self._members = members
        self._directory = directory
        self._min_free_bytes, self._free_bytes = min_free_bytes, free_bytes
        self._moving_s: float | None = None
        """Last monotonic time at which a learner was connected and the run was not paused."""
        self._stopped_s = 0.0
        """Last monotonic time at which the run was paused or yielding; waiting before that time is not counted."""
        self._idle: tuple[int, int, float] | None = None
        """Session and step of a batch that the idle learner has not requested, and the time at which this began."""
        self._unreadable_data = ""
        self._step = -1
        self._next_warning_s = 0.0
        """Seconds of waiting for `_step` after which the next warning is due."""
        self.stalls: list[str] = []

    def check(self, now_s: float) -> list[str]:
        """Return due warnings: of a stall after 1, 2, 4, 8, … times `logger.stall_warning_s`."""
        run, self.stalls = self._exchange.active, []
        if run is None:
            self._moving_s = None
            return []
        others = [*self._check_disk(run), *self._check_data(run)]
        self.stalls = self._check_stall(run, now_s)
        return [*others, *self.stalls]

    def _bytes_to_come(self, run: ActiveRun) -> int:
        """Return the bytes that admitted and leased groups will take, by the mean size of recent groups."""
        groups = self._ledger.groups_by_state(run.run_id)
        return int((groups[State.ADMITTED] + groups[State.LEASED]) * self._ledger.mean_result_bytes(run.run_id))

    def _check_disk(self, run: ActiveRun) -> list[str]:
        free_bytes, to_come = self._free_bytes(self._directory), self._bytes_to_come(run)
        was_closed = bool(self._exchange.admission_closed)
        closed = free_bytes - to_come < self._min_free_bytes
        free = f"{free_bytes >> 20} MB are free in {self._directory}"
        if to_come >> 20:
            free += f", {to_come >> 20} MB of which open groups will take"
        limit = f"--min-free-mb is {self._min_free_bytes >> 20}"
        self._exchange.close_admission(f"{free} and {limit}" if closed else "")
        if closed and not was_closed:
            return [f"admission is closed: {free}, {limit}. Open groups are still trained; free some disk space"]
        return [f"admission is open again: {free}"] if was_closed and not closed else []

    def _check_data(self, run: ActiveRun) -> list[str]:
        """Warn once when the run's prompts become unreadable, and once when they are readable again."""
        before, self._unreadable_data = self._unreadable_data, run.state.unreadable_data
        if self._unreadable_data and not before:
            return [
                f"no prompt is admitted: {self._unreadable_data}. Open groups are still trained; reading is "
                "retried automatically"
            ]
        return ["prompts are read again"] if before and not self._unreadable_data else []

    def _check_stall(self, run: ActiveRun, now_s: float) -> list[str]:
        row = self._ledger.run(run.run_id)
        learners = [m for m in self._connected(common_pb2.ROLE_LEARNER) if m.session == row["session"]]
        step = row["next_batch"] if run.prompts is not None else row["next_step"]
        over = row["next_step"] >= run.num_steps
        stopped = row["state"] != "running" or bool(run.state.yields_to)
        if stopped:
            self._stopped_s, self._idle = now_s, None
        if self._moving_s is None or stopped or over:
            self._moving_s, self._step = now_s, -1
            return []
        since_s, is_requested = self._moving_s, True
        if learners:
            requested_s = run.state.first_requested_s.get(step)
            self._moving_s, is_requested = now_s, requested_s is not None
            has_work = row["next_batch"] > row["next_step"] or run.prompts is None
            if requested_s is None and has_work and any(m.ready_run == run.run_id for m in learners):
                self._step, self._idle = -1, None
                return []
            since_s = self._idle_since(row["session"], step, now_s) if requested_s is None else requested_s
        waited_s, warn_s = now_s - max(since_s, self._stopped_s), run.spec.logger.stall_warning_s
        if step != self._step:
            self._step, self._next_warning_s = step, warn_s
        if waited_s < self._next_warning_s:
            return []
        while self._next_warning_s <= waited_s:
            self._next_warning_s *= 2
        return [explain(self._facts(run, step, waited_s, len(learners), is_requested))]

    def _idle_since(self, session: int, step: int, now_s: float) -> float:
        """Return the time at which this session first had neither a batch to train nor a request for one."""
        if self._idle is None or self._idle[:2] != (session, step):
            self._idle = (session, step, now_s)
        return self._idle[2]

    def _facts(self, run: ActiveRun, step: int, waited_s: float, learners: int, is_requested: bool) -> Facts:
        rollouts, rewards = self._connected(common_pb2.ROLE_ROLLOUT), self._connected(common_pb2.ROLE_REWARD)
        environments = self._connected(common_pb2.ROLE_ENVIRONMENT) if run.spec.environment.is_used else None
        held = self._ledger.group_queries.num_held()
        groups = self._ledger.groups_by_state(run.run_id)
        return Facts(
            waited_s=waited_s,
            step=step,
            workers=WorkerCounts(
                learners=learners,
                rollouts=len(rollouts),
                ready_rollouts=sum(member.ready_run == run.run_id for member in rollouts),
                rewards=len(rewards),
                environments=None if environments is None else len(environments),
                ready_environments=sum(member.ready_run == run.run_id for member in environments or ()),
            ),
            is_requested=is_requested,
            versions=tuple(version.step for version in self._exchange.workers.versions.values()),
            leases=groups[State.LEASED],
            holders=sum(member.member_id in held for member in (rollouts if environments is None else environments)),
            tasks=sum(held.get(member.member_id, 0) for member in rewards),
            groups=groups,
            batch=run.batch_size,
            max_age=run.max_age,
            admission_closed=self._exchange.admission_closed,
            unreadable_data=run.state.unreadable_data,
        )

    def _connected(self, role: common_pb2.Role.ValueType) -> list[Member]:
        return [member for member in self._members.of_role(role) if member.connected]


@dataclass(frozen=True)
class WorkerCounts:
    """Numbers of connected workers; `learners` work on the run, and the `ready` workers have set it up."""

    learners: int
    rollouts: int
    ready_rollouts: int
    rewards: int
    environments: int | None = None
    """Number of environment workers, which hold the leases; None for a run without an environment."""
    ready_environments: int = 0


@dataclass(frozen=True)
class Facts:
    waited_s: float
    """Seconds of waiting for the batch of `step`; without a learner, seconds since the last one was connected."""
    step: int
    workers: WorkerCounts
    versions: tuple[int, ...]
    """Steps of the versions that the rollout workers have acknowledged."""
    leases: int
    holders: int
    """Number of workers that hold leases."""
    tasks: int
    """Number of score tasks that reward workers hold."""
    groups: Mapping[str, int]
    """Number of open groups in each state. The key is the state."""
    batch: int
    """B, the number of groups in a step."""
    max_age: int
    """η, the largest age in steps."""
    is_requested: bool = True
    """True if the learner has requested the batch of `step`; if not, `waited_s` counts from its last training step."""
    admission_closed: str = ""
    """Reason why no group is admitted; empty if groups are admitted."""
    unreadable_data: str = ""
    """Reason why the next prompt cannot be read; empty if it can be."""


def explain(facts: Facts) -> str:
    """Return one sentence that names what is missing, with numbers, and one with the remedy."""
    waited = f"{facts.waited_s:.0f} s"
    if not facts.workers.learners:
        return (
            f"no learner has worked on step {facts.step} for {waited}: no learner is connected. "
            "Start a learner, or read the log of the last learner"
        )
    if not facts.is_requested:
        return (
            f"the learner has not requested the data of step {facts.step} for {waited}: it loads, saves or publishes, or one "
            "of its ranks hangs. Read the logs of its ranks"
        )
    reason, advice = _why(facts)
    return f"the learner has waited {waited} for the data of step {facts.step}: {reason}. {advice}"


def _why(facts: Facts) -> tuple[str, str]:
    workers = facts.workers
    holder = "rollout" if workers.environments is None else "environment"
    groups = facts.groups
    held = f"{counted(facts.holders, f'{holder} worker')} hold{'s' if facts.holders == 1 else ''} leases"
    to_generate = groups.get(State.ADMITTED, 0) + groups.get(State.LEASED, 0)
    to_score = groups.get(State.GENERATED, 0)
    scored = groups.get(State.SCORED, 0)
    if facts.admission_closed:
        return (
            f"admission is closed, because {facts.admission_closed}",
            "Free some disk space; admission then opens automatically",
        )
    if facts.unreadable_data:
        return (
            f"no prompt is admitted, because {facts.unreadable_data}",
            "Admission continues automatically when the data can be read",
        )
    if scored >= facts.batch:
        return (
            f"enough groups are scored ({scored}), but the batch waits for {counted(to_generate + to_score, 'older group')}",
            "The run continues after async_grpo.late_wait_s, or when the older groups are complete (order: in_order)",
        )
    if to_score + scored < facts.batch and workers.environments == 0:
        return (
            f"{held}, but no environment worker is connected",
            "Start environment workers, or read in the last worker's log why it died",
        )
    if to_score + scored < facts.batch and workers.environments and not workers.ready_environments:
        return (
            f"no worker has set the run up ({counted(workers.environments, 'environment worker')})",
            "Read their logs: the user's code may take long to load",
        )
    if to_score + scored < facts.batch and not workers.rollouts:
        nobody = "no rollout worker is connected"
        missing = f"{held}, but {nobody}" if workers.environments is None else nobody
        return missing, "Start rollout workers, or read in the last worker's log why it died"
    if to_score + scored < facts.batch and not workers.ready_rollouts:
        return (
            f"no worker has set the run up ({counted(workers.rollouts, 'rollout worker')})",
            "Read their logs: a model takes long to load, or cannot be loaded",
        )
    if to_score + scored < facts.batch and not facts.leases:
        newest = max(facts.versions, default=-1)
        if newest < facts.step - facts.max_age:
            has = f"the newest weights are version {newest}" if facts.versions else "no worker has weights"
            return (
                f"0 {holder} workers hold leases, {has}, and step {facts.step} needs version "
                f"{facts.step - facts.max_age}",
                "Weights do not arrive: look for 'did not reach' in the coordinator's log and check "
                "weights.max_wait_s and the network from learner to rollout",
            )
        return (
            f"{held}, although groups could be leased ({groups.get(State.ADMITTED, 0)})",
            "The workers request no leases: read their logs, and check that their processes are not stopped",
        )
    if to_score and not workers.rewards:
        return f"no reward worker is connected for {counted(to_score, 'generated group')}", "Start reward workers"
    if to_score and to_score + scored >= facts.batch:
        return (
            f"the step waits for scores of {counted(to_score, 'group')}, and reward workers hold {facts.tasks} of them",
            "Scoring is the bottleneck: add reward workers, or check the time-outs of the reward functions",
        )
    return (
        f"{held} ({counted(facts.leases, 'lease')}); scored: {scored} of {counted(facts.batch, 'group')}; not scored yet: {to_score}",
        "Generation is the bottleneck: add rollout workers, or raise async_grpo.max_trajectory_age_steps",
    )

"""Reactions to workers that cannot work on the active run: wait, pause and retry, pause for a person, or fail.

A run fails only by a fault of its spec, and only before its first step. A temporary fault of all workers of a role (a
file, a hub, an absent mount) pauses the run with each worker's message; the run continues automatically when one of
these workers can work. Rollout and reward workers retry by themselves; a learner gets a new session after a back-off.
`decide` is pure; `Faults` keeps the members' messages in `Member.fault`, and the coordinator calls it at every tick.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Sequence

from paceline.calls.backoff import ExponentialBackoff
from paceline.services.coordinator.lifecycle.run_states import RunStates
from paceline.services.coordinator.members.registry import Fault, Member, Members
from paceline.services.coordinator.pool.assignments import Assignments
from paceline.services.coordinator.pool.run_context import RunContext
from paceline.services.coordinator.text_limits import one_line
from paceline.v1 import common_pb2, worker_pb2

ROLES = (common_pb2.ROLE_ROLLOUT, common_pb2.ROLE_REWARD, common_pb2.ROLE_LEARNER, common_pb2.ROLE_ENVIRONMENT)
MEMBERS_SHOWN = 5
RETRIED = "It is retried automatically"

log = logging.getLogger(__name__)


class Decision(enum.IntEnum):
    """Reaction to the faults of a role; of several reactions, the largest is applied."""

    GO_ON = 0
    RETRY = 1
    """Pause; the run continues automatically when a worker of the role can work."""
    ASK = 2
    """Pause until a person resumes the run."""
    FAIL = 3


def decide(members: Sequence[Member], run_id: str, next_step: int) -> Decision:
    """Return the reaction to the faults of all `members` of one role, for a run whose next step is `next_step`."""
    faults = [member.fault for member in members if member.fault is not None]
    if not members or len(faults) < len(members) or any(fault.run_id != run_id for fault in faults):
        return Decision.GO_ON  # a member works, or has not reported a fault yet
    if any(fault.resumable for fault in faults):
        return Decision.ASK
    if next_step == 0 and all(fault.kind == worker_pb2.FAULT_SPEC for fault in faults):
        return Decision.FAIL
    return Decision.RETRY


def explain(members: Sequence[Member]) -> str:
    """Return a text with the members' role and the messages of their faults; equal messages are given once."""
    ids_by_text: dict[str, list[str]] = {}
    for member in members:
        if member.fault is not None:
            ids_by_text.setdefault(member.fault.message, []).append(member.member_id)
    if len(ids_by_text) == 1:
        return f"{members[0].role_name}: {next(iter(ids_by_text))}"
    texts = [f"{', '.join(ids)}: {text}" for text, ids in list(ids_by_text.items())[:MEMBERS_SHOWN]]
    num_more = len(ids_by_text) - MEMBERS_SHOWN
    return f"{members[0].role_name}: " + "; ".join(texts) + (f"; and {num_more} more faults" if num_more > 0 else "")


class Faults:
    def __init__(self, context: RunContext, members: Members, states: RunStates, assignments: Assignments):
        self._context, self._members, self._states = context, members, states
        self._assignments = assignments
        self._backoff = ExponentialBackoff()
        self._step = -1
        """The run's next step when the learner last failed."""
        self._retry_learner_s: float | None = None
        """Monotonic time at which the learner gets a new session."""
        self._roles: set[common_pb2.Role.ValueType] = set()

    async def on_error(self, member: Member, report: worker_pb2.RunReport) -> None:
        """Note that a member cannot work on the active run."""
        log.warning(
            "%s %s cannot work on %s: %s", member.role_name, member.member_id, report.run_id, one_line(report.error)
        )
        fault = Fault(report.run_id, report.error, report.fault, report.resumable)
        is_repeated = member.fault == fault
        member.fault, member.ready_run = fault, ""
        if member.role == common_pb2.ROLE_LEARNER:
            self._end_session(report, fault)
            await self._assignments.assign_learner()  # a standby learner may get the run
        peers = self._connected(member.role)
        if not is_repeated and decide(peers, report.run_id, 0) is Decision.GO_ON and member in peers:
            await self._context.watchers.warn(
                [f"{member.role_name} {member.member_id} cannot work on the run: {report.error}. {RETRIED}"]
            )
        await self.check(time.monotonic())

    async def on_ready(self, member: Member) -> None:
        member.fault = None
        await self.check(time.monotonic())

    def clear(self) -> None:
        for member in self._members.all():
            member.fault = None
        self._roles.clear()
        self._backoff.reset()
        self._retry_learner_s = None

    async def check(self, now_s: float) -> None:
        """Pause, fail or continue the active run according to the members' faults. Called at every tick."""
        run = self._context.exchange.active
        if run is None:
            return
        next_step = self._context.ledger.run(run.run_id)["next_step"]
        decisions = {role: decide(self._connected(role), run.run_id, next_step) for role in ROLES}
        worst = max(decisions.values())
        in_trouble = [role for role in ROLES if decisions[role] is not Decision.GO_ON]
        message = "; ".join(explain(self._connected(role)) for role in in_trouble)
        if worst is Decision.FAIL:
            await self._states.fail(run.run_id, message)
            return
        if worst is not Decision.GO_ON:
            self._roles.update(in_trouble)
            retried = worst is Decision.RETRY
            await self._states.pause_on_fault(
                run.run_id, f"{message}. {RETRIED}" if retried else message, retried=retried
            )
        elif self._roles and all(self._works(role, run.run_id) for role in self._roles):
            self._roles.clear()
            await self._states.continue_run(run.run_id)
        if decisions[common_pb2.ROLE_LEARNER] is Decision.RETRY:
            await self._retry_learner(next_step, now_s)

    async def _retry_learner(self, next_step: int, now_s: float) -> None:
        if self._retry_learner_s is None:
            if next_step > self._step:
                self._backoff.reset()
            self._step, self._retry_learner_s = next_step, now_s + self._backoff.next_s()
        elif now_s >= self._retry_learner_s:
            self._retry_learner_s = None
            for learner in self._workers(common_pb2.ROLE_LEARNER):
                learner.fault = None
            await self._assignments.assign_learner()

    def _end_session(self, report: worker_pb2.RunReport, fault: Fault) -> None:
        """End the session of all ranks, because a fault of any rank ends it."""
        for learner in self._workers(common_pb2.ROLE_LEARNER):
            if learner.session == report.session:
                learner.session, learner.fault, learner.ready_run = 0, fault, ""

    def _workers(self, role: common_pb2.Role.ValueType) -> list[Member]:
        """Return the members of a role that get work; of a learner's ranks only the first."""
        return [member for member in self._members.of_role(role) if member.introduction.rank == 0]

    def _connected(self, role: common_pb2.Role.ValueType) -> list[Member]:
        """Return the workers of a role whose stream is connected; a worker without a stream works on nothing."""
        return [member for member in self._workers(role) if member.connected]

    def _works(self, role: common_pb2.Role.ValueType, run_id: str) -> bool:
        return any(member.ready_run == run_id for member in self._connected(role))

"""What follows when workers cannot work on the active run: wait, pause and try again, pause for a person, or fail.

A run fails only by the fault of its spec, and only before its first step. Whatever keeps all workers of a role from working
later (a file, a hub, a mount that is away) pauses the run with what each of them says; the run goes on by itself as soon as
one of them can work. Rollout and reward workers try again by themselves; a learner gets a new session after a growing pause.

`judge` is pure; `Faults` keeps what members said in `Member.fault` and is asked at every tick.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from paceline.backoff import ExponentialBackoff
from protos.paceline.v1 import common_pb2, worker_pb2
from services.coordinator.exchange.state import Exchange
from services.coordinator.ledger.ledger import Ledger
from services.coordinator.members.registry import Fault, Member, Members
from services.coordinator.pool.pool import Pool
from services.coordinator.text_limits import one_line

ROLES = (common_pb2.ROLE_ROLLOUT, common_pb2.ROLE_REWARD, common_pb2.ROLE_LEARNER)
MEMBERS_SHOWN = 5
AGAIN = "It is tried again by itself"

log = logging.getLogger(__name__)


class Verdict(enum.IntEnum):
    """What to do with the run; of several, the largest counts."""

    GO_ON = 0
    RETRY = 1
    """Pause; the run goes on by itself when a worker of the role can work."""
    ASK = 2
    """Pause until a person resumes the run."""
    FAIL = 3


def judge(members: Sequence[Member], run_id: str, next_step: int) -> Verdict:
    """What the faults of all `members` of one role mean for a run whose next step is `next_step`."""
    faults = [member.fault for member in members if member.fault is not None]
    if not members or len(faults) < len(members) or any(fault.run_id != run_id for fault in faults):
        return Verdict.GO_ON  # one of them works, or has not said yet that it cannot
    if any(fault.resumable for fault in faults):
        return Verdict.ASK
    if next_step == 0 and all(fault.kind == worker_pb2.FAULT_SPEC for fault in faults):
        return Verdict.FAIL
    return Verdict.RETRY


def explain(members: Sequence[Member]) -> str:
    """The role and what its members say, each text once."""
    said: dict[str, list[str]] = {}
    for member in members:
        if member.fault is not None:
            said.setdefault(member.fault.message, []).append(member.member_id)
    if len(said) == 1:
        return f"{members[0].role_name}: {next(iter(said))}"
    texts = [f"{', '.join(ids)}: {text}" for text, ids in list(said.items())[:MEMBERS_SHOWN]]
    more = f"; and {len(said) - MEMBERS_SHOWN} more faults" if len(said) > MEMBERS_SHOWN else ""
    return f"{members[0].role_name}: " + "; ".join(texts) + more


class Runs(Protocol):
    """What faults may make of the active run; implemented by the coordinator."""

    ledger: Ledger
    exchange: Exchange
    members: Members
    pool: Pool

    async def warn(self, messages: list[str]) -> None:
        """An event of the run for people."""

    async def fail(self, run_id: str, message: str) -> None:
        """Ends the run."""

    async def pause_on_fault(self, run_id: str, message: str, *, retried: bool = False) -> None:
        """Pauses the run."""

    async def take_up(self, run_id: str) -> None:
        """Goes on with the run."""


class Faults:
    """Those of one coordinator's members. One owner of `Member.fault`."""

    def __init__(self, runs: Runs, pause: ExponentialBackoff | None = None):
        self._runs = runs
        self._pause = pause or ExponentialBackoff()
        self._step = -1
        """Next step of the run when the learner failed last."""
        self._learner_again_s: float | None = None
        self._roles: set[common_pb2.Role.ValueType] = set()
        """Roles for whose sake the active run is paused."""

    async def on_error(self, member: Member, report: worker_pb2.RunReport) -> None:
        """A member says that it cannot work on the active run."""
        log.warning(
            "%s %s cannot work on %s: %s",
            member.role_name,
            member.member_id,
            report.run_id,
            one_line(report.error),
        )
        fault = Fault(report.run_id, report.error, report.fault, report.resumable)
        known = member.fault == fault
        member.fault, member.ready_run = fault, ""
        if member.role == common_pb2.ROLE_LEARNER:
            self._end_session(report, fault)
            await self._runs.pool.assignments.assign_learner()  # another one may stand by
        peers = self._heard_of(member.role)
        if not known and judge(peers, report.run_id, 0) is Verdict.GO_ON and member in peers:
            await self._runs.warn(
                [f"{member.role_name} {member.member_id} cannot work on the run: {report.error}. {AGAIN}"]
            )
        await self.look(time.monotonic())

    async def on_ready(self, member: Member) -> None:
        """A member has set up the active run."""
        member.fault = None
        await self.look(time.monotonic())

    def forget(self) -> None:
        """A person resumes the run, or another run starts: everybody is tried again."""
        for member in self._runs.members.all():
            member.fault = None
        self._roles.clear()
        self._pause.reset()
        self._learner_again_s = None

    async def look(self, now_s: float) -> None:
        """Pauses, fails or takes up the active run, as the members' faults want it; at every tick."""
        run = self._runs.exchange.active
        if run is None:
            return
        next_step = self._runs.ledger.run(run.run_id)["next_step"]
        verdicts = {role: judge(self._heard_of(role), run.run_id, next_step) for role in ROLES}
        worst = max(verdicts.values())
        in_trouble = [role for role in ROLES if verdicts[role] is not Verdict.GO_ON]
        message = "; ".join(explain(self._heard_of(role)) for role in in_trouble)
        if worst is Verdict.FAIL:
            await self._runs.fail(run.run_id, message)
            return
        if worst is not Verdict.GO_ON:
            self._roles.update(in_trouble)
            retried = worst is Verdict.RETRY
            await self._runs.pause_on_fault(
                run.run_id, f"{message}. {AGAIN}" if retried else message, retried=retried
            )
        elif self._roles and all(self._works(role, run.run_id) for role in self._roles):
            self._roles.clear()
            await self._runs.take_up(run.run_id)
        if verdicts[common_pb2.ROLE_LEARNER] is Verdict.RETRY:
            await self._try_learner(next_step, now_s)

    async def _try_learner(self, next_step: int, now_s: float) -> None:
        """Gives the learner a new session when its pause is over."""
        if self._learner_again_s is None:
            if next_step > self._step:
                self._pause.reset()
            self._step, self._learner_again_s = next_step, now_s + self._pause.next_s()
        elif now_s >= self._learner_again_s:
            self._learner_again_s = None
            for learner in self._workers(common_pb2.ROLE_LEARNER):
                learner.fault = None
            await self._runs.pool.assignments.assign_learner()

    def _end_session(self, report: worker_pb2.RunReport, fault: Fault) -> None:
        """Any rank's fault ends the session of all."""
        for learner in self._workers(common_pb2.ROLE_LEARNER):
            if learner.session == report.session:
                learner.session, learner.fault, learner.ready_run = 0, fault, ""

    def _workers(self, role: common_pb2.Role.ValueType) -> list[Member]:
        """Members of a role that are given work: of a learner's ranks the first."""
        return [member for member in self._runs.members.of_role(role) if member.rank == 0]

    def _heard_of(self, role: common_pb2.Role.ValueType) -> list[Member]:
        """Without those whose stream broke: they are about to be gone, and work on nothing meanwhile."""
        return [member for member in self._workers(role) if member.connected]

    def _works(self, role: common_pb2.Role.ValueType, run_id: str) -> bool:
        return any(member.ready_run == run_id for member in self._heard_of(role))

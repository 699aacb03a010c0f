"""The pool of members: lets workers join, suspects and expels them, and removes those that leave or are silent.

A worker that joins is assigned to the active run (`assignments.py`). A member that is silent for half the time-out is
suspected: it leaves the roster, and work that others wait for is leased again. After the whole time-out it is removed;
if its stream broke and it has no session, it is removed after half of the time-out. After one and a half time-outs a
learner's rank is lost, and the learner's other ranks are notified.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from paceline.errors import AccessDenied, LedgerFault
from paceline.groups import Version
from paceline.models.loading import named_size
from paceline.rate_limited_log import unforeseen
from paceline.services.common.access.rights import current_caller
from paceline.services.coordinator.exchange import leases
from paceline.services.coordinator.exchange.batches import session_faults
from paceline.services.coordinator.exchange.state import ActiveRun
from paceline.services.coordinator.members.introduction import check_place, checked_host
from paceline.services.coordinator.members.registry import Introduction, LoopLag, Member, Members
from paceline.services.coordinator.pool.assignments import Assignments
from paceline.services.coordinator.pool.reports import Reports, RunEvents
from paceline.services.coordinator.text_limits import cut, one_line
from paceline.v1 import common_pb2, worker_pb2

LOGGED_PAUSE_S = 1.0
"""Seconds of the shortest pause of the coordinator that is logged."""

OVERDUE_CHECK_S = 5.0
"""Seconds between two checks for overdue leases."""

SILENT_TIMEOUTS = 1.5
"""Number of time-outs for which a rank is silent before its learner ends: 15 s with the default time-out."""

IN_GOOD_ORDER = "in good order"
"""Reason that is recorded when a member leaves without a fault."""

LEFT = "left: "

log = logging.getLogger(__name__)


class Pool:
    """Members of one coordinator; `runs` handles the events that concern the run."""

    def __init__(self, runs: RunEvents, members: Members):
        context = runs.context
        self.members = members
        self.assignments = Assignments(members, context.ledger, context.exchange, context.lock, runs.pause_on_fault)
        self.lag = LoopLag()
        self.overdue_check_s = OVERDUE_CHECK_S
        self._overdue_checked_s = 0.0
        """Monotonic time of the last check for overdue leases."""
        self._runs = runs
        self._context, self._ledger, self._exchange = context, context.ledger, context.exchange
        self._lost_ranks = LostRanks(SILENT_TIMEOUTS * members.timeout_s)
        self._reports = Reports(runs, members, self.assignments, self.expel, self._add_member_event)

    def expect_holders(self) -> None:
        """After a restart, keep members that hold leases or the newest session, except a learner that had left. Call
        this once they can reach the coordinator: from then on they have the usual time to return before their leases
        are revoked."""
        active = self._exchange.active
        lease_role = active.lease_role if active is not None else common_pb2.ROLE_ROLLOUT
        for member_id, role in self._ledger.holders(lease_role):
            # Counted as connected: as members with a broken stream they would get half the time, which is less than
            # a worker's longest back-off.
            self._expect(member_id, role)
        run, holder = self._exchange.active, self.assignments.restore_session()
        if run is None or holder is None:
            return
        if not self._ledger.newest_of_member(run.run_id, holder).startswith(LEFT):
            self._expect(holder, common_pb2.ROLE_LEARNER, run)

    def _expect(self, member_id: str, role: common_pb2.Role.ValueType, run: ActiveRun | None = None) -> None:
        if self.members.get(member_id) is None:
            session = self._ledger.run(run.run_id)["session"] if run is not None else 0
            expected = Member(member_id, Introduction(role), time.monotonic(), session=session, is_expected=True)
            self.members.add(expected)

    async def expire_silent(self) -> None:
        now_s = time.monotonic()
        if pause_s := self.lag.take():
            self.members.ignore_silence(pause_s, now_s)
            self._lost_ranks.ignore_silence(pause_s)
            if pause_s > LOGGED_PAUSE_S:
                log.warning(
                    "the coordinator stood still for %.1f s; this does not count as silence of members", pause_s
                )
        for member in self.members.silent(now_s):
            with self._fault_of(member):
                # A process that dies closes its stream; a process that is stopped or cut off does not.
                why = f"silent for {now_s - member.last_report_s:.0f} s"
                await self.leave(member, why, crashed=not member.connected)
        for member in self.members.quiet(now_s):
            with self._fault_of(member):
                await self._suspect(member, f"silent for {now_s - member.last_report_s:.0f} s")
        self._end_learners_without_rank(now_s)
        await self.revoke_from_silent()
        # The task that was about to assign the next learner may have ended with a member that left.
        await self.assignments.assign_learner()
        await self._take_overdue()

    def _end_learners_without_rank(self, now_s: float) -> None:
        """If a rank of a learner is silent, notify the other ranks, because they wait for it in collectives."""
        learners = self.members.of_role(common_pb2.ROLE_LEARNER)
        for reason, others in self._lost_ranks.check(learners, now_s):
            log.warning("%s; its learner's other ranks end: %s", reason, ", ".join(m.member_id for m in others))
            for member in others:
                member.direct(worker_pb2.ConnectResponse(rank_lost=worker_pb2.RankLost(reason=reason)))

    @contextmanager
    def _fault_of(self, member: Member) -> Iterator[None]:
        """End a member's stream on an unexpected error in its bookkeeping, and continue; ledger errors are raised."""
        try:
            yield
        except (LedgerFault, sqlite3.Error):
            raise
        except Exception as error:  # the error concerns this member only: the others are still served
            unforeseen.note("the bookkeeping of a member", error)
            member.stream.error = error
            member.end_stream()

    async def join(self, hello: worker_pb2.Hello) -> Member:
        """Add a worker that joins, or that returns on a new stream. Raises PlaceTaken if another worker has its id."""
        earlier = self.members.get(hello.member_id)
        check_place(hello, earlier)
        run = self._exchange.active
        same_run = run is not None and hello.run_id == run.run_id
        session = self.assignments.claim_session(hello) if same_run else 0
        introduction = Introduction(
            hello.role,
            hello.address,
            hello.rank,
            hello.http_address,
            hello.world_size,
            hello.learner_id if hello.role == common_pb2.ROLE_LEARNER else "",
            shown_secret=hello.secret,
            exchange_key=hello.exchange_key,
            caller=current_caller(),
        )
        host = checked_host(hello.host_agent) if hello.HasField("host_agent") else None
        member = Member(hello.member_id, introduction, time.monotonic(), session=session, host=host)
        if earlier is not None:
            member.weights.offered.extend(earlier.weights.offered)
            member.times = earlier.times
        if same_run:
            self.assignments.note_session(hello)
        if same_run and hello.HasField("version") and member.role == common_pb2.ROLE_ROLLOUT:
            self._take_version(member, hello.version)
        self.members.add(member)
        self._lost_ranks.joined(member.introduction.learner_id, member.last_report_s)
        self._exchange.senders.enter(member)
        self._exchange.workers.clear_suspicion(member.member_id)
        log.info("%s %s %s", member.role_name, member.member_id, "is back" if earlier else "joined")
        if run is not None and member.role != common_pb2.ROLE_LEARNER:
            self.assignments.assign(member)
        return member

    def _take_version(self, member: Member, reported: common_pb2.PolicyVersion) -> None:
        """Note the version that a worker held before it joined; a version that the run has not published is ignored."""
        version = Version(reported.session, reported.step)
        self._exchange.workers.note_session(version.session)
        if self.assignments.is_published(version):
            member.weights.version = version
            self._exchange.workers.acknowledge(member.member_id, version)
        else:
            log.warning("%s holds %s, which this run has not published", member.member_id, tuple(version))
            member.weights.ahead_session = version.session

    async def joined(self, member: Member) -> None:
        """Send a new member the directives after its Welcome, and record that it joined."""
        if member.role == common_pb2.ROLE_LEARNER:
            await self.assignments.assign_learner()
            self.assignments.roster.clear()  # a learner that returns has no roster yet
        if member.weights.ahead_session:
            await self.assignments.begin_session_above_holder(member)
        self.assignments.update_lists()
        await self._add_member_event(member, "joined")
        run, loads = self._exchange.active, member.role == common_pb2.ROLE_ROLLOUT and member.weights.version is None
        if loads and run is not None and run.prompts:
            model = await asyncio.to_thread(named_size, run.spec.policy.model_name)
            await self._add_member_event(member, f"loads {model}")

    async def disconnected(self, member: Member) -> None:
        """Suspect a member whose stream broke; it has some time to return."""
        if self.members.get(member.member_id) is member:
            member.connected = False
            # Directives on their way are lost; when the member returns, it gets a new roster and new offers.
            await self._suspect(member, "its stream broke")
            if member.role == common_pb2.ROLE_LEARNER:
                await self.assignments.assign_learner()

    async def leave(self, member: Member, reason: str, *, crashed: bool = False) -> None:
        """Remove a member: its leases and tasks go to others, and it is not in the next roster."""
        if self.members.get(member.member_id) is not member:
            return
        self.members.remove(member.member_id)
        self._exchange.senders.leave(member.member_id)  # before any await, because the member may return meanwhile
        member.end_stream()
        run = self._exchange.active
        async with self._context.lock:
            with self._kept_on_fault(member), self._ledger.transaction(synced=False):
                released = leases.revoke_from_member(self._exchange, member.member_id, crashed=crashed)
                if run is not None:
                    self._ledger.evaluations.unpin_member(run.run_id, member.member_id)
                notices = self._exchange.notices.take()
                self._context.run_log.write_down(notices)
        level = logging.INFO if reason == IN_GOOD_ORDER else logging.WARNING
        name = f"{member.role_name} {member.member_id}"
        log.log(level, "%s left (%s); %d leases revoked", name, one_line(reason), released)
        self.assignments.update_lists()
        self._context.server.wake("lease", "task")
        await self._add_member_event(member, f"{LEFT}{reason}")
        if member.role == common_pb2.ROLE_LEARNER:
            await self.assignments.assign_learner()
        await self._runs.act_on(notices)

    async def put_out(self, member: Member, why: str) -> None:
        """Remove a member whose caller is no longer allowed, and end its stream with the reason."""
        member.stream.error = AccessDenied(why)
        await self.leave(member, why)

    @contextmanager
    def _kept_on_fault(self, member: Member) -> Iterator[None]:
        """Keep a member as silent and disconnected if its leases could not be revoked; a later check retries."""
        try:
            yield
        except BaseException:
            member.connected = False
            self.members.add(member)
            raise

    async def report(self, member: Member, request: worker_pb2.ConnectRequest) -> None:
        """Handle one report of a member; ignore it if the member has left or has a newer stream."""
        if self.members.get(member.member_id) is not member:
            return
        member.last_report_s, member.stream.is_heard = time.monotonic(), True
        if member.suspected:
            member.suspected = False
            self._exchange.workers.clear_suspicion(member.member_id)
            self.assignments.update_lists()
            await self._add_member_event(member, "reports again")
        if request.WhichOneof("report") == "leave":
            reason = cut(request.leave.reason)
            if not reason:
                self._lost_ranks.left(member.introduction.learner_id, member.member_id)
            if member.session and not reason:
                await self._note_left(member.session)
            await self.leave(member, reason or IN_GOOD_ORDER, crashed=bool(reason))
        else:
            await self._reports.take(member, request)

    async def _note_left(self, session: int) -> None:
        run = self._exchange.active
        if run is not None:
            async with self._context.lock:
                with self._ledger.transaction(synced=False):
                    session_faults.note_left(self._exchange, run, session)

    async def _suspect(self, member: Member, why: str) -> None:
        """Suspect a member: it is not in the next roster, and no batch waits for its groups until it reports again."""
        if member.suspected or self._context.watchers.stopping:
            return
        member.suspected = True
        self._exchange.workers.suspect(member.member_id)
        self._context.server.wake("batch")
        log.warning("%s %s is suspected: %s", member.role_name, member.member_id, why)
        self.assignments.update_lists()
        await self._add_member_event(member, f"suspected: {why}")

    async def _take_overdue(self) -> None:
        run, now_s = self._exchange.active, time.monotonic()
        if run is None or now_s - self._overdue_checked_s < self.overdue_check_s:
            return
        self._overdue_checked_s = now_s
        overdue = leases.find_overdue(self._exchange, run, now_s)
        if not overdue:
            return
        async with self._context.lock:
            with self._ledger.transaction():
                leases.revoke_overdue(self._exchange, run, overdue)
                notices = self._exchange.notices.take()
                self._context.run_log.write_down(notices)
        self._context.server.wake("lease", "task")
        await self._runs.act_on(notices)

    async def revoke_from_silent(self) -> None:
        """Lease the work of silent workers to others before their time-out: score tasks at once, groups only if the
        learner waits, because generating twice costs more. Skip members whose stream broke: their groups may have
        caused a crash."""
        silent = [member.member_id for member in self.members.all() if member.suspected and member.connected]
        run = self._exchange.active
        if run is None or not silent:
            return
        async with self._context.lock:
            if not self._ledger.group_queries.num_held().keys() & set(silent):
                return
            with self._ledger.transaction():
                waits = self._exchange.learner_waits(run)
                number = leases.revoke_work(self._exchange, silent, with_leases=waits)
        if number:
            log.info("%d groups of silent workers are leased to others: %s", number, ", ".join(silent))
            self._context.server.wake("lease", "task")

    async def expel(self, member: Member, report: worker_pb2.PublishReport) -> None:
        """Expel a member that missed a deadline for a version: it is notified, and not in the next roster."""
        if member.weights.expelled:
            return
        member.weights.expelled = True
        log.warning("%s %s is expelled from epoch %d", member.role_name, member.member_id, report.epoch)
        expelled = worker_pb2.Expelled(run_id=report.run_id, epoch=report.epoch, reason=report.error)
        member.direct(worker_pb2.ConnectResponse(expelled=expelled))
        self.assignments.update_lists()
        await self._add_member_event(member, f"expelled from epoch {report.epoch}: {report.error}")

    async def _add_member_event(self, member: Member, what: str) -> None:
        run = self._exchange.active
        if run is not None:
            async with self._context.lock:
                with self._ledger.transaction(synced=False):  # no reader sees the event before a later sync
                    if what == "joined":
                        self._ledger.deaths.remove_member(member.member_id)  # it returned, so no group crashed it
                    content = {"role": member.role_name, "member_id": member.member_id, "what": what}
                    self._ledger.add_event(run.run_id, "member", content)
            await self._context.watchers.notify()


@dataclass
class _Learner:
    """Times of one learner's ranks, including those that are no longer members."""

    joined_s: float
    """Monotonic time at which the last of its ranks joined or returned."""
    heard_s: dict[str, float] = field(default_factory=dict)
    """Monotonic time of each rank's last report. The key is the rank's member id."""


class LostRanks:
    def __init__(self, limit_s: float):
        self._limit_s = limit_s
        self._learners: dict[str, _Learner] = {}

    def joined(self, learner_id: str, now_s: float) -> None:
        """Note that a rank has joined or returned; `learner_id` is empty for all other members."""
        if learner_id:
            self._learners.setdefault(learner_id, _Learner(now_s)).joined_s = now_s

    def left(self, learner_id: str, member_id: str) -> None:
        if learner_id in self._learners:
            self._learners[learner_id].heard_s.pop(member_id, None)

    def ignore_silence(self, pause_s: float) -> None:
        """Move all times forward by `pause_s` seconds, in which no report could be read."""
        for learner in self._learners.values():
            learner.joined_s += pause_s
            learner.heard_s = {member_id: heard_s + pause_s for member_id, heard_s in learner.heard_s.items()}

    def check(self, members: Iterable[Member], now_s: float) -> Iterator[tuple[str, list[Member]]]:
        """Yield, once for each learner with lost ranks, a message about one lost rank and the members to notify."""
        present: dict[str, list[Member]] = {}
        for member in members:
            if member.introduction.learner_id in self._learners:
                present.setdefault(member.introduction.learner_id, []).append(member)
                self._learners[member.introduction.learner_id].heard_s[member.member_id] = member.last_report_s
        for learner_id, learner in list(self._learners.items()):
            if learner_id not in present:
                del self._learners[learner_id]
                continue
            heard_s = learner.heard_s.items()
            silent_s = {member_id: now_s - max(last_s, learner.joined_s) for member_id, last_s in heard_s}
            lost = [member_id for member_id in silent_s if silent_s[member_id] > self._limit_s]
            others = [m for m in present[learner_id] if m.connected and m.member_id not in lost]
            if lost and others:
                yield f"learner {lost[0]} is silent for {silent_s[lost[0]]:.0f} s", others
                for member_id in lost:
                    del learner.heard_s[member_id]

"""Assigns runs to workers and sessions to learners, and sends the lists by which members find each other. A learner
that joins gets a new session, from the newest checkpoint that can be loaded. If there is none and the earlier
samples are gone, the run is paused."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from paceline.encryption.storage_key import storage_key
from paceline.errors import NotFound
from paceline.groups import Version
from paceline.services.common.access.rights import GENERATE, Caller
from paceline.services.common.access.sessions import issue
from paceline.services.coordinator import sessions
from paceline.services.coordinator.exchange import admission, evaluation
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.members.registry import Member, Members
from paceline.services.coordinator.pool.host_plans import HostPlans
from paceline.services.coordinator.sessions import SessionNumbers, scan_checkpoints
from paceline.services.coordinator.text_limits import one_line
from paceline.tracing import step_traceparent
from paceline.v1 import common_pb2, worker_pb2

NAMED = 16
"""Largest number of members that a log line names, because thousands may join one by one."""

SESSIONS_KEPT = 64

MAX_LATER_SESSIONS = 3
"""Largest number of sessions that end, while this coordinator runs, because a worker holds weights of a later session.
A restored backup causes few; a worker that claims ever later sessions must not prevent training."""

log = logging.getLogger(__name__)


class Roster:
    """The newest roster of the active run: the rollout workers that receive weights. They are ready, and neither pinned
    by an evaluation nor suspected nor expelled. Each change gets a new number, `epoch` in protos. `learner` returns the
    member to notify."""

    def __init__(self, members: Members, exchange: Exchange, learner: Callable[[], Member | None]):
        self._members, self._exchange, self._learner = members, exchange, learner
        self.number = 0
        """Number of the newest roster; `clear` keeps it."""
        self.run_id = ""
        """Id of the newest roster's run; empty if the learner must get the roster again."""
        self.member_ids: list[str] = []
        self._host_member_ids: list[str] = []
        self.plans = HostPlans(members, exchange, learner)

    def clear(self) -> None:
        """Clear the roster, because the run is over or the learner must get it again."""
        self.run_id, self.member_ids, self._host_member_ids = "", [], []

    def update(self) -> None:
        """Send the learner a new roster if the set of members has changed."""
        run = self._exchange.active
        if run is None:
            return
        member_ids = self._receivers(run)
        host_ids = [i for i in member_ids if (m := self._members.get(i)) is not None and m.host is not None]
        if (run.run_id, member_ids, host_ids) == (self.run_id, self.member_ids, self._host_member_ids):
            self.plans.update(self.number, self.member_ids)  # a member may have a new stream
            return
        earlier_ids = self.member_ids
        self.run_id, self.member_ids, self._host_member_ids = run.run_id, member_ids, host_ids
        self.number += 1
        for member_id in set(member_ids) - set(earlier_ids):
            if (newcomer := self._members.get(member_id)) is not None:
                newcomer.weights.named_in = self.number
                newcomer.stream.host_plan = None  # the learner waits for its answer, even if it has the version already
        log.info("epoch %d of run %s: %s", self.number, run.run_id, listed_names(member_ids))
        directive = worker_pb2.Epoch(
            run_id=run.run_id, number=self.number, member_ids=member_ids, host_member_ids=host_ids
        )
        if (learner := self._learner()) is not None:
            learner.direct(worker_pb2.ConnectResponse(epoch=directive))
        self.plans.update(self.number, self.member_ids)

    def _receivers(self, run: ActiveRun) -> list[str]:
        pinned = evaluation.pinned_member(self._exchange, run)
        return [
            member.member_id
            for member in self._members.of_role(common_pb2.ROLE_ROLLOUT)
            if member.ready_run == run.run_id
            and member.connected
            and not member.suspected
            and not member.weights.expelled
            and member.member_id != pinned
        ]


def listed_names(member_ids: Sequence[str]) -> str:
    if not member_ids:
        return "nobody"
    more = len(member_ids) - NAMED
    return ", ".join(member_ids[:NAMED]) + (f" and {more} more" if more > 0 else "")


class Assignments:
    """Assigns the active run to members; `lock` serialises transactions, `pause` pauses a run with a reason."""

    def __init__(
        self,
        members: Members,
        ledger: Ledger,
        exchange: Exchange,
        lock: asyncio.Lock,
        pause: Callable[[str, str], Awaitable[None]],
    ):
        self.roster = Roster(members, exchange, self.learner)
        self._sessions: dict[tuple[str, int], str] = {}
        """Member ids of the learners of the newest SESSIONS_KEPT sessions. The key is run id and session."""
        self._members, self._ledger, self._exchange, self._lock = members, ledger, exchange, lock
        self._pause = pause
        self._numbers = SessionNumbers()
        self._num_later_sessions = 0

    async def assign_all(self) -> None:
        for role in (common_pb2.ROLE_ROLLOUT, common_pb2.ROLE_REWARD, common_pb2.ROLE_ENVIRONMENT):
            for member in self._members.of_role(role):
                self.assign(member)
        await self.assign_learner()
        self.update_engines()

    def update_lists(self) -> None:
        """Send the roster to the learner, and the list of rollout workers to environment workers, if changed."""
        self.roster.update()
        self.update_engines()

    async def fall_back(self, member: Member, report: worker_pb2.RunReport) -> None:
        """Begin the next session from an older checkpoint, because the newest one cannot be loaded."""
        if not report.session or member.session != report.session:
            return  # repeated by another rank of the same learner
        member.session = 0
        later_session = sessions.session_in_the_way(self._ledger, self._exchange.active, report)
        if later_session is not None:
            await self.begin_session_above(later_session)
            return
        async with self._lock:
            with self._ledger.transaction():
                is_known = sessions.mark_damaged(self._ledger, report.run_id, report.checkpoint_path, report.error)
                if is_known:
                    message = f"session {report.session} could not begin: {report.error}; the next session begins from an older checkpoint"
                    log.warning("run %s: %s", report.run_id, one_line(message))
                    self._ledger.add_event(report.run_id, "warning", {"message": message})
        if not is_known:
            await self._pause(report.run_id, f"learner: {report.error}")
            return
        await self.assign_learner()

    def end_session(self) -> None:
        """End the learner's session; its next assignment brings a new one."""
        for learner in self._members.of_role(common_pb2.ROLE_LEARNER):
            learner.session = 0

    def unassign_all(self, reason: str) -> None:
        """Make all members idle, because the run is over."""
        for member in self._members.all():
            member.session, member.ready_run, member.weights.version, member.fault = 0, "", None, None
            member.direct(worker_pb2.ConnectResponse(idle=worker_pb2.Idle(reason=reason)))
        self._exchange.workers.clear_versions()
        self.roster.clear()

    def assign(self, member: Member) -> None:
        """Assign the active run to a member other than a learner, if the run has work for it."""
        run = self._exchange.active
        assert run is not None
        has_work = member.role != common_pb2.ROLE_ENVIRONMENT or run.spec.environment.is_used
        if run.prompts is not None and has_work:
            member.direct(self._assignment(self._ledger.run(run.run_id), run.spec_yaml))

    # Sessions

    def learner(self) -> Member | None:
        """Return rank 0 of the learner with the newest session, even with a broken stream; None if there is none."""
        run = self._exchange.active
        if run is None:
            return None
        session = self._ledger.run(run.run_id)["session"]
        member = self._members.get(self._sessions.get((run.run_id, session), ""))
        return member if member is not None and member.session == session else None

    def had_session(self, member: Member, run_id: str, session: int) -> bool:
        return self._sessions.get((run_id, session)) == member.member_id

    def claim_session(self, hello: worker_pb2.Hello) -> int:
        """Return the session that a learner continues: the newest one if it is this learner's, else 0. After a restart
        the ledger names the learner; if it names none, the first to claim the session gets it. A learner that is
        ahead of the ledger gets none, because the ledger is a backup."""
        run = self._exchange.active
        assert run is not None
        newest = int(self._ledger.run(run.run_id)["session"])
        if hello.role != common_pb2.ROLE_LEARNER or hello.rank != 0 or not newest or hello.session != newest:
            return 0
        if hello.HasField("version") and not self._ledger.receipts.has_rank_0(
            run.run_id, newest, hello.version.step - 1
        ):
            log.warning("%s has receipts of session %d that this ledger does not have", hello.member_id, newest)
            return 0
        holder = self._sessions.setdefault((run.run_id, newest), hello.member_id)
        if holder != hello.member_id:
            return 0
        run.state.note_ranks(hello.world_size)
        return newest

    def restore_session(self) -> str | None:
        """Return the id of the learner with the active run's newest session in the ledger; None if there is none."""
        run = self._exchange.active
        member_id = self._ledger.session_holder(run.run_id) if run is not None else ""
        if run is None or not member_id:
            return None
        return self._sessions.setdefault((run.run_id, self._ledger.run(run.run_id)["session"]), member_id)

    def is_published(self, version: Version) -> bool:
        """Return whether a session of the run may have published a version; publishing precedes the step's receipt."""
        run = self._exchange.active
        row = self._ledger.run(run.run_id) if run is not None else None
        return row is not None and version.session <= row["session"] and version.step <= row["next_batch"]

    async def assign_learner(self) -> None:
        """Assign the active run to a learner in a new session, unless a learner has it, even with a broken stream."""
        active = self._exchange.active
        if active is None or not self._waiting():
            return
        await self._check_checkpoints(active)
        async with self._lock:
            run, waiting = self._exchange.active, self._waiting()
            if run is None or run.run_id != active.run_id or not waiting:
                return
            row = self._ledger.run(run.run_id)
            try:
                start, no_start = sessions.starting_point(self._ledger, run), ""
            except NotFound as error:
                no_start = str(error)
            else:
                self._begin_session(waiting[-1], row, run, start)
        if no_start and (row["state"], row["message"]) != ("paused", no_start):
            await self._pause(run.run_id, no_start)

    def _waiting(self) -> list[Member]:
        """Return learners that can get a session; none while a learner has the newest one."""
        holder = self.learner()
        if holder is not None and holder.fault is None:
            return []
        learners = [m for m in self._members.of_role(common_pb2.ROLE_LEARNER) if m.introduction.rank == 0]
        return [m for m in learners if m.connected and not m.is_expected and m.fault is None]

    async def _check_checkpoints(self, run: ActiveRun) -> None:
        """Note sessions named in the folder of checkpoints, and set aside checkpoints that are ahead of the ledger."""
        folder = sessions.folder_of(self._ledger, run)
        if folder.local is None:
            return  # the learner checks the object store, because it has the credentials
        row = self._ledger.run(run.run_id)
        registered_paths = self._ledger.checkpoints.paths(run.run_id)
        # A `checkpoint_dir` outside of the run's folder may belong to a run of the same name in another ledger; after
        # the restore of a backup it belongs to this run.
        is_own = folder.local.is_relative_to(self._ledger.run_store(run.run_id))
        try:
            scan = await asyncio.to_thread(
                scan_checkpoints,
                folder.local,
                (row["session"], row["next_step"]),
                registered_paths,
                move=is_own or self._ledger.was_restored,
            )
        except OSError as error:
            log.warning("the checkpoints of run %s cannot be read: %s", run.run_id, error)
            return
        self._numbers.note_session(run.run_id, row["session"], scan.session)
        if scan.moved:
            message = (
                f"checkpoints {', '.join(scan.moved)} are ahead of the ledger, which is at session {row['session']} and "
                f"step {row['next_step']}: the ledger may be a backup. These checkpoints were moved to {scan.place}, and nothing loads them"
            )
            log.warning("run %s: %s", run.run_id, message)
            async with self._lock:
                with self._ledger.transaction():
                    self._ledger.add_event(run.run_id, "warning", {"message": message})

    def note_session(self, hello: worker_pb2.Hello) -> None:
        """Note the sessions that a member's Hello names, because a restored ledger may not know them."""
        run = self._exchange.active
        assert run is not None
        newest = self._ledger.run(run.run_id)["session"]
        self._numbers.note_session(run.run_id, newest, max(hello.session, hello.version.session))

    async def begin_session_above_holder(self, member: Member) -> None:
        """Begin a session numbered above that of a worker's weights, at most MAX_LATER_SESSIONS times."""
        run, session = self._exchange.active, member.weights.ahead_session
        if run is None or session < self._ledger.run(run.run_id)["session"]:
            return
        if self._num_later_sessions >= MAX_LATER_SESSIONS:
            log.warning(
                "%s holds weights of session %d, which this ledger does not know; this is ignored, because it has "
                "happened %d times before. Restart the worker if it receives no weights",
                member.member_id,
                session,
                MAX_LATER_SESSIONS,
            )
            return
        self._num_later_sessions += 1
        await self.begin_session_above(session)

    async def begin_session_above(self, session: int) -> None:
        """Begin a session numbered above `session`, which a worker or a folder has and the ledger does not know."""
        run = self._exchange.active
        if run is None:
            return
        newest = self._ledger.run(run.run_id)["session"]
        if session < newest or not self._numbers.note_session(run.run_id, newest, session):
            return
        self.end_session()
        await self.assign_learner()

    def _begin_session(self, member: Member, row: sqlite3.Row, run: ActiveRun, start: sessions.Start) -> None:
        session = self._numbers.next(row["run_id"], row["session"])
        publish_from_step = max(0, row["published_step"])
        with self._ledger.transaction():
            self._ledger.update_run(row["run_id"], session=session)
            content = {"session": session, "step": start.step, "member_id": member.member_id}
            content["publish_from_step"] = publish_from_step
            self._ledger.add_event(row["run_id"], "session", content)
            self._ledger.invalidate(f"sessions {row['run_id']}")
        self._sessions[row["run_id"], session] = member.member_id
        run.state.note_ranks(member.introduction.world_size)
        while len(self._sessions) > SESSIONS_KEPT:
            self._sessions.pop(next(iter(self._sessions)))
        member.session = session
        assignment = self._assignment(
            row,
            run.spec_yaml,
            session=session,
            start_step=start.step,
            checkpoint_path=start.path,
            checkpoint_sha256=start.sha256,
            chain=start.chain,
            publish_from_step=publish_from_step,
        )
        member.direct(assignment)
        self.roster.clear()
        self.update_lists()

    def _assignment(self, row: sqlite3.Row, spec_yaml: str, **session: Any) -> worker_pb2.ConnectResponse:
        """Return the assignment of a run, with the fields of a learner's session."""
        run_id, key = row["run_id"], storage_key()
        assignment = worker_pb2.RunAssignment(
            run_id=run_id,
            spec_yaml=spec_yaml,
            directory=self._ledger.run_store(run_id),
            traceparent=step_traceparent(run_id, 0),
            bundle=self._ledger.bundle(run_id),
            storage_key="" if key is None else key.name.hex(),
            **session,
        )
        return worker_pb2.ConnectResponse(run=assignment)

    def update_engines(self) -> None:
        """Send the list of serving rollout workers to the active run's environment workers that have an older one."""
        run = self._exchange.active
        if run is None or not run.spec.environment.is_used:
            return
        lists: dict[Caller | None, worker_pb2.Engines] = {}
        for member in self._members.of_role(common_pb2.ROLE_ENVIRONMENT):
            if member.introduction.caller not in lists:
                lists[member.introduction.caller] = self._engines_for(member.introduction.caller, run)
            listed = lists[member.introduction.caller]
            if member.connected and member.stream.engines != listed:
                member.stream.engines = listed
                member.direct(worker_pb2.ConnectResponse(engines=listed))

    def _engines_for(self, caller: Caller | None, run: ActiveRun) -> worker_pb2.Engines:
        """Return the serving rollout workers, each with a ticket for the caller."""
        listed = worker_pb2.Engines(run_id=run.run_id)
        for sampler in admission.serving_samplers(self._exchange, run):
            entry = listed.engines.add(member_id=sampler.member_id, address=sampler.address)
            entry.version.session, entry.version.step = sampler.version
            if member := self._exchange.senders.get(sampler.member_id):
                entry.ticket.CopyFrom(issue(member.stream.call_key, member.member_id, GENERATE, caller))
        return listed

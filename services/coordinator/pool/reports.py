"""Checks whether a member may make a report, and handles the report. `Pool` receives reports, notes their times and
passes them on. A report counts only if it comes from the right role and, for a learner, from the right session. Any
other report comes from a confused or lying member: it is ignored, and the run continues."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from paceline.errors import InvalidInput, NotFound
from paceline.files.names import EXPORT
from paceline.groups import Version
from paceline.rate_limited_log import RateLimitedLog
from paceline.services.coordinator import sessions
from paceline.services.coordinator.exchange.batches import session_faults
from paceline.services.coordinator.exchange.notices import Notice
from paceline.services.coordinator.exchange.state import ActiveRun
from paceline.services.coordinator.ledger.ledger import ACTIVE_STATES
from paceline.services.coordinator.ledger.tables.checkpoints import stored
from paceline.services.coordinator.members.introduction import checked_host
from paceline.services.coordinator.members.registry import WARNINGS_KEPT, Member, Members
from paceline.services.coordinator.pool.assignments import Assignments
from paceline.services.coordinator.pool.run_context import RunContext
from paceline.services.coordinator.reporting.member_files import TokenFiles, fault_of
from paceline.services.coordinator.text_limits import cut, finite_gauges, one_line, seconds
from paceline.v1 import common_pb2, worker_pb2


class WorkerFaults(Protocol):
    async def on_error(self, member: Member, report: worker_pb2.RunReport) -> None:
        """Handle a member that cannot work on the active run."""

    async def on_ready(self, member: Member) -> None:
        """Handle a member that has set up the active run."""


class RunEvents(Protocol):
    """The owner of the runs, as the pool sees it: it handles the pool's events."""

    context: RunContext

    @property
    def faults(self) -> WorkerFaults: ...

    async def act_on(self, notices: list[Notice]) -> None:
        """Handle the notices of a transaction."""

    async def pause_on_fault(self, run_id: str, message: str, *, retried: bool = False) -> None:
        """Pause a run that cannot continue."""

    async def learner_finished(self, session: int) -> None:
        """Note that the learner has finished; end the run if nothing else is pending."""


WARNINGS_PERIOD_S = 60.0
"""Seconds in which a member may send WARNINGS_KEPT warnings, and as many new faults."""

MAX_HASH = 128
"""Largest number of characters of a digest or of a chain's hash."""
MAX_PATH_BYTES = 4096
MAX_SOURCES = 4096
TEXTS = {"weight_ack": ("message",), "run_report": ("error", "warning"), "publish": ("error",), "leave": ("reason",)}
"""Names of the free-text fields. The key is the kind of report."""

FREE = ("heartbeat", "leave", "host_agent")
"""Reports that any member may make at any time."""

log = logging.getLogger(__name__)
seldom = RateLimitedLog(log)


class Reports:
    """Handles the reports of one coordinator's members; `runs` handles the events that concern the run."""

    def __init__(
        self,
        runs: RunEvents,
        members: Members,
        assignments: Assignments,
        expel: Callable[[Member, worker_pb2.PublishReport], Awaitable[None]],
        add_event: Callable[[Member, str], Awaitable[None]],
    ):
        """`expel` removes a member from the roster, `add_event` adds an event about a member."""
        self._runs, self._expel, self._add_event = runs, expel, add_event
        self._members, self._assignments = members, assignments
        self._context, self._ledger, self._exchange = runs.context, runs.context.ledger, runs.context.exchange
        self._tokens = TokenFiles(self._ledger.path.parent)

    async def take(self, member: Member, request: worker_pb2.ConnectRequest) -> None:
        """Handle one report, if this member may make it. Raises InvalidInput for a second Hello."""
        kind = request.WhichOneof("report")
        if kind == "hello":
            raise InvalidInput("only the first message of a stream must be hello; open a new stream")
        for name in TEXTS.get(kind or "", ()):
            report = getattr(request, kind or "")
            setattr(report, name, cut(getattr(report, name)))
        refusal = self._refusal(member, request)
        if refusal:
            if self._is_late(request):
                return
            about = f"{kind} of {member.role_name} {member.member_id}"
            seldom.warning(about, "ignored a %s: %s", about, one_line(refusal))
            return
        match kind:
            case "heartbeat":
                gauges = member.measures.logged.add_gauges(finite_gauges(request.heartbeat.gauges))
                member.measures.gauges = member.measures.functions.add_gauges(gauges)
                if member.draining != request.heartbeat.draining:
                    member.draining = request.heartbeat.draining
                    self._assignments.update_engines()
            case "weight_offer":
                receiver = self._members.get(request.weight_offer.member_id)
                if receiver is not None and receiver.role == common_pb2.ROLE_ROLLOUT:
                    version = _version(request.weight_offer.version)
                    receiver.weights.offered.append(version)
                    self._exchange.workers.offer(receiver.member_id, version)
                    receiver.direct(worker_pb2.ConnectResponse(weight_offer=request.weight_offer))
            case "host_version":
                roster = self._assignments.roster
                roster.plans.take(request.host_version, roster.number, roster.member_ids)
            case "host_agent":
                member.host, member.stream.host_plan = checked_host(request.host_agent), None
                self._assignments.roster.update()
            case "weight_ack":
                await self._on_weight_ack(member, request.weight_ack)
            case "weight_progress":
                if (learner := self._assignments.learner()) is not None:
                    learner.direct(worker_pb2.ConnectResponse(weight_progress=request.weight_progress))
            case "run_report":
                await self._on_run_report(member, request.run_report)
            case "checkpoint":
                await self._on_checkpoint(member, request.checkpoint)
            case "staged":
                roster = self._assignments.roster
                self._context.run_log.note_staged(request.staged, roster.number, len(roster.member_ids))
            case "publish":
                await self._on_publish(request.publish)
            case "token_statistics":
                self._tokens.keep(request.token_statistics)

    async def _on_weight_ack(self, member: Member, ack: worker_pb2.WeightAck) -> None:
        run = self._exchange.active
        if run is not None and ack.ok:
            member.weights.version = _version(ack.version)
            self._exchange.workers.acknowledge(member.member_id, member.weights.version)
            self._context.run_log.note_pause(ack)
            member.measures.paused_s += seconds(ack.pause_s)
            if slow := self._assignments.roster.plans.note(member, ack.host_transfer):
                await self._context.watchers.warn([slow])
            async with self._context.lock:
                if ack.version.step > self._ledger.run(run.run_id)["published_step"]:
                    with self._ledger.transaction(synced=False):
                        self._ledger.update_run(run.run_id, published_step=ack.version.step)
            self._assignments.update_engines()
            self._context.server.wake("lease")
        if (learner := self._assignments.learner()) is not None:
            learner.direct(worker_pb2.ConnectResponse(weight_ack=ack))

    async def _on_run_report(self, member: Member, report: worker_pb2.RunReport) -> None:
        run = self._exchange.active
        if run is None:
            return
        if report.warning:
            await self._context.watchers.warn([report.warning])
            return
        if report.fault == worker_pb2.FAULT_CHECKPOINT:
            await self._assignments.fall_back(member, report)
            return
        if report.fault in (worker_pb2.FAULT_STEP, worker_pb2.FAULT_MEMORY):
            await self._on_step_fault(run, member, report)
            return
        if report.error:
            await self._runs.faults.on_error(member, report)
            self._assignments.update_engines()
            return
        is_set_up = member.role == common_pb2.ROLE_ROLLOUT and member.ready_run != run.run_id
        member.ready_run, member.weights.expelled = run.run_id, False
        await self._runs.faults.on_ready(member)
        if report.vocab_size:
            await self._update_run(run.run_id, vocab_size=report.vocab_size)
        if report.finished:
            export = f"{self._ledger.run_store(run.run_id)}/{EXPORT}"
            path = stored(self._ledger.path.parent, export)
            await self._update_run(run.run_id, export_path=path)
            await self._runs.learner_finished(report.session)
        self._assignments.update_lists()
        if is_set_up:
            await self._add_event(member, "has loaded the model")

    async def _update_run(self, run_id: str, **columns: Any) -> None:
        async with self._context.lock:
            with self._ledger.transaction(synced=False):
                self._ledger.update_run(run_id, **columns)

    async def _on_step_fault(self, run: ActiveRun, member: Member, report: worker_pb2.RunReport) -> None:
        """End the session of a rank that could not train its step; the learner's processes end on their own."""
        if member.role != common_pb2.ROLE_LEARNER:
            return
        for learner in self._members.of_role(common_pb2.ROLE_LEARNER):
            if learner.session == report.session:
                learner.session, learner.ready_run = 0, ""
        async with self._context.lock:
            with self._ledger.transaction():
                session_faults.on_report(self._exchange, run, report, member.introduction.rank)
                notices = self._exchange.notices.take()
                self._context.run_log.write_down(notices)
        await self._runs.act_on(notices)

    async def _on_checkpoint(self, member: Member, report: worker_pb2.CheckpointReport) -> None:
        run = self._exchange.active
        if run is None or report.run_id != run.run_id:
            return
        refusal = sessions.refusal(self._ledger, run, report)
        if refusal:
            await self._context.watchers.warn(
                [f"a checkpoint of session {report.session} is not registered: {refusal}"]
            )
            return
        async with self._context.lock:
            with self._ledger.transaction():
                # A learner repeats earlier reports after a restart.
                if self._ledger.checkpoints.add(report):
                    content = {"step": report.step, "path": report.path, "seconds": seconds(report.seconds)}
                    self._ledger.add_event(report.run_id, "checkpoint", content)
                sessions.mark_surplus_removed(self._ledger, run.run_id, run.spec.checkpointing)
            kept = sessions.kept_paths(self._ledger, report.run_id)
        directive = worker_pb2.KeepCheckpoints(run_id=report.run_id, paths=kept)
        member.direct(worker_pb2.ConnectResponse(keep_checkpoints=directive))
        await self._context.watchers.notify()

    async def _on_publish(self, report: worker_pb2.PublishReport) -> None:
        self._context.run_log.note_publish(report)
        if report.ok:
            return
        step, why = report.version.step, one_line(report.error)
        log.warning("version %d did not reach %s: %s", step, report.member_id[:64], why)
        member = self._members.get(report.member_id)
        missed = report.failure in (worker_pb2.PUBLISH_FAILURE_LINK, worker_pb2.PUBLISH_FAILURE_SILENT)
        if missed and member is not None and report.epoch >= member.weights.named_in:
            await self._expel(member, report)

    # Authority

    def _refusal(self, member: Member, request: worker_pb2.ConnectRequest) -> str:
        kind = request.WhichOneof("report")
        if kind is None:
            return "the coordinator does not support this kind of report; update it if it is older than the worker"
        if kind in FREE:
            return ""
        run, report = self._exchange.active, getattr(request, kind)
        if run is None or report.run_id != run.run_id:
            return f"run {report.run_id[:80]!r} is not the current run"
        session = int(self._ledger.run(run.run_id)["session"])
        match kind:
            case "weight_offer" | "staged" | "publish":
                return self._check_learner(member, report.version, session)
            case "host_version":
                hosts, relays = len(report.sources), len(report.source_agent_ids)
                if not 0 < hosts <= MAX_SOURCES or hosts != relays:
                    return f"the report has addresses of {hosts} hosts of the learner, but ids of {relays} relays"
                return self._check_learner(member, report.version, session)
            case "weight_ack" | "weight_progress":
                return self._check_receiver(member, report.member_id, report.version)
            case "run_report":
                return self._check_run_report(run, member, report, session)
            case "checkpoint":
                if not self._assignments.had_session(member, run.run_id, report.session):
                    return f"the worker did not have session {report.session}"
                is_long = max(len(report.sha256), len(report.chain)) > MAX_HASH
                if is_long or len(report.path.encode()) > MAX_PATH_BYTES:
                    return "the digest, chain or path is too long"
            case "token_statistics":
                if self._assignments.learner() is not member or report.session != session:
                    return f"the worker does not have the learner's session {session}"
                if report.step >= self._ledger.run(run.run_id)["next_batch"]:
                    return f"step {report.step} has no batch yet"
                return fault_of(report)
        return ""

    def _is_late(self, report: worker_pb2.ConnectRequest) -> bool:
        """Return whether a report acknowledges a version of an ended run, as usually happens with a run's last
        version."""
        if report.WhichOneof("report") != "weight_ack":
            return False
        try:
            return self._ledger.run(report.weight_ack.run_id)["state"] not in ("queued", *ACTIVE_STATES)
        except NotFound:
            return False

    def _check_learner(self, member: Member, version: common_pb2.PolicyVersion, session: int) -> str:
        if self._assignments.learner() is not member:
            return f"the worker does not have the learner's session {session}"
        if version.session != session:
            return f"version {version.step} is of session {version.session}, but the newest is {session}"
        return ""

    def _check_receiver(self, member: Member, member_id: str, reported: common_pb2.PolicyVersion) -> str:
        version = Version(reported.session, reported.step)
        if member.role != common_pb2.ROLE_ROLLOUT:
            return f"a {member.role_name} worker receives no weights"
        if member_id != member.member_id:
            return f"the report is about another member, {member_id[:80]!r}"
        if version not in member.weights.offered:
            return f"version {tuple(version)} was not offered to the worker"
        if not self._assignments.is_published(version):
            return f"version {tuple(version)} was not published by the run"
        return ""

    def _check_run_report(self, run: ActiveRun, member: Member, reported: worker_pb2.RunReport, session: int) -> str:
        if member.role == common_pb2.ROLE_LEARNER:
            if reported.session != session:
                return f"session {reported.session} is not the newest, which is {session}"
            # Other ranks report only their own errors.
            if run.state.ranks and member.introduction.rank >= run.state.ranks:
                return f"the learner has {run.state.ranks} ranks, and rank {member.introduction.rank} is none of them"
            if not (reported.error or reported.warning) and self._assignments.learner() is not member:
                return f"the worker does not have the learner's session {session}"
            if len(reported.export_path.encode()) > MAX_PATH_BYTES:
                return "the path of the export is too long"
        elif reported.finished or reported.export_path or reported.vocab_size:
            return f"a {member.role_name} worker exports nothing and has no vocabulary"
        if reported.warning:
            return self._check_number("warned", member.times.warned_s)
        # A learner's fault ends its session, so there are few.
        if reported.error and member.role != common_pb2.ROLE_LEARNER:
            is_repeated = member.fault is not None and member.fault.message == reported.error
            return "" if is_repeated else self._check_number("failed", member.times.failed_s)
        return ""

    def _check_number(self, what: str, times_s: deque[float]) -> str:
        """Limit a member's reports of a kind, because each becomes an event of the run."""
        now_s = time.monotonic()
        if len(times_s) == WARNINGS_KEPT and now_s - times_s[0] < WARNINGS_PERIOD_S:
            return f"the worker has {what} {WARNINGS_KEPT} times within {WARNINGS_PERIOD_S:g} s"
        times_s.append(now_s)
        return ""


def _version(reported: common_pb2.PolicyVersion) -> Version:
    return Version(reported.session, reported.step)

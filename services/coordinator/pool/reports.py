"""Handlers of members' reports: weights that arrived, runs that are set up or cannot go on, checkpoints, publishes.

`Pool` takes a report in, notes its time and passes it on to here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from paceline.errors import InvalidInput
from paceline.files.names import EXPORT
from paceline.groups import Version
from paceline.rate_limited_log import RateLimitedLog
from paceline.services.coordinator import sessions
from paceline.services.coordinator.exchange.batches import session_faults
from paceline.services.coordinator.exchange.state import ActiveRun
from paceline.services.coordinator.ledger.tables.checkpoints import stored
from paceline.services.coordinator.members.introduction import checked_host
from paceline.services.coordinator.members.registry import Member, Members
from paceline.services.coordinator.pool.assignments import Assignments
from paceline.services.coordinator.pool.authority import Authority, cut_texts
from paceline.services.coordinator.pool.run_events import RunEvents
from paceline.services.coordinator.reporting.member_files import TokenFiles
from paceline.services.coordinator.text_limits import finite_gauges, one_line, seconds
from paceline.v1 import common_pb2, worker_pb2

log = logging.getLogger(__name__)
seldom = RateLimitedLog(log)


class Reports:
    """Handlers for one coordinator's members; `runs` takes the events that concern the run."""

    def __init__(
        self,
        runs: RunEvents,
        members: Members,
        assignments: Assignments,
        expel: Callable[[Member, worker_pb2.PublishReport], Awaitable[None]],
        add_event: Callable[[Member, str], Awaitable[None]],
    ):
        """`expel` takes a member out of the roster, `add_event` adds an event about a member."""
        self._runs, self._expel, self._add_event = runs, expel, add_event
        self._members, self._assignments = members, assignments
        self._ledger, self._exchange, self._run_log = runs.ledger, runs.exchange, runs.run_log
        self._lock: asyncio.Lock = runs.lock
        self._authority = Authority(assignments, runs.ledger, runs.exchange)
        self._tokens = TokenFiles(runs.ledger.path.parent)

    async def take(self, member: Member, request: worker_pb2.ConnectRequest) -> None:
        """Act on one report, if this member may make it. Raises InvalidInput for a second Hello."""
        kind = request.WhichOneof("report")
        if kind == "hello":
            raise InvalidInput("hello is the first message of a stream, and there is one")
        cut_texts(request)
        refusal = self._authority.refusal(member, request)
        if refusal:
            if self._authority.is_late(request):
                return
            about = f"{kind} of {member.role_name} {member.member_id}"
            seldom.warning(about, "ignored a %s: %s", about, one_line(refusal))
            return
        match kind:
            case "heartbeat":
                gauges = member.logged.add_gauges(finite_gauges(request.heartbeat.gauges))
                member.gauges = member.functions.add_gauges(gauges)
                if member.draining != request.heartbeat.draining:
                    member.draining = request.heartbeat.draining
                    self._assignments.engines.update()
            case "weight_offer":
                receiver = self._members.get(request.weight_offer.member_id)
                if receiver is not None and receiver.role == common_pb2.ROLE_ROLLOUT:
                    version = _version(request.weight_offer.version)
                    receiver.offered.append(version)
                    self._exchange.offer(receiver.member_id, version)
                    receiver.direct(worker_pb2.ConnectResponse(weight_offer=request.weight_offer))
            case "host_version":
                roster = self._assignments.roster
                roster.plans.take(request.host_version, roster.number, roster.member_ids)
            case "host_agent":
                member.host, member.host_plan = checked_host(request.host_agent), None
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
                self._run_log.note_staged(request.staged, roster.number, len(roster.member_ids))
            case "publish":
                await self._on_publish(request.publish)
            case "token_statistics":
                self._tokens.keep(request.token_statistics)

    async def _on_weight_ack(self, member: Member, ack: worker_pb2.WeightAck) -> None:
        run = self._exchange.active
        if run is not None and ack.ok:
            member.version = _version(ack.version)
            self._exchange.versions[member.member_id] = member.version
            self._run_log.note_pause(ack)
            member.paused_s += seconds(ack.pause_s)
            if slow := self._assignments.roster.plans.note(member, ack.host_transfer):
                await self._runs.warn([slow])
            async with self._lock:
                if ack.version.step > self._ledger.run(run.run_id)["published_step"]:
                    with self._ledger.transaction(synced=False):
                        self._ledger.update_run(run.run_id, published_step=ack.version.step)
            self._assignments.engines.update()
            self._runs.server.wake("lease")
        if (learner := self._assignments.learner()) is not None:
            learner.direct(worker_pb2.ConnectResponse(weight_ack=ack))

    async def _on_run_report(self, member: Member, report: worker_pb2.RunReport) -> None:
        run = self._exchange.active
        if run is None:
            return
        if report.warning:
            await self._runs.warn([report.warning])
            return
        if report.fault == worker_pb2.FAULT_CHECKPOINT:
            await self._assignments.fall_back(member, report)
            return
        if report.fault in (worker_pb2.FAULT_STEP, worker_pb2.FAULT_MEMORY):
            await self._on_step_fault(run, member, report)
            return
        if report.error:
            await self._runs.faults.on_error(member, report)
            self._assignments.engines.update()
            return
        is_set_up = member.role == common_pb2.ROLE_ROLLOUT and member.ready_run != run.run_id
        member.ready_run, member.expelled = run.run_id, False
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
        async with self._lock:
            with self._ledger.transaction(synced=False):
                self._ledger.update_run(run_id, **columns)

    async def _on_step_fault(self, run: ActiveRun, member: Member, report: worker_pb2.RunReport) -> None:
        """End the session of a rank that could not train its step; its processes end by themselves."""
        if member.role != common_pb2.ROLE_LEARNER:
            return
        for learner in self._members.of_role(common_pb2.ROLE_LEARNER):
            if learner.session == report.session:
                learner.session, learner.ready_run = 0, ""
        async with self._lock:
            with self._ledger.transaction():
                session_faults.on_report(self._exchange, run, report, member.rank)
                notices = self._exchange.take_notices()
                self._run_log.write_down(notices)
        await self._runs.act_on(notices)

    async def _on_checkpoint(self, member: Member, report: worker_pb2.CheckpointReport) -> None:
        run = self._exchange.active
        if run is None or report.run_id != run.run_id:
            return
        refusal = sessions.refusal(self._ledger, run, report)
        if refusal:
            message = f"a checkpoint of session {report.session} is not registered: {refusal}"
            await self._runs.warn([message])
            return
        async with self._lock:
            with self._ledger.transaction():
                # A learner reports known checkpoints again after a restart.
                if self._ledger.checkpoints.add(report):
                    content = {"step": report.step, "path": report.path, "seconds": report.seconds}
                    self._ledger.add_event(report.run_id, "checkpoint", content)
                sessions.mark_surplus_removed(self._ledger, run.run_id, run.spec.checkpointing)
            kept = sessions.kept_paths(self._ledger, report.run_id)
        directive = worker_pb2.KeepCheckpoints(run_id=report.run_id, paths=kept)
        member.direct(worker_pb2.ConnectResponse(keep_checkpoints=directive))
        await self._runs.tell_watchers()

    async def _on_publish(self, report: worker_pb2.PublishReport) -> None:
        self._run_log.note_publish(report)
        if report.ok:
            return
        log.warning(
            "version %d did not reach %s: %s",
            report.version.step,
            report.member_id[:64],
            one_line(report.error),
        )
        member = self._members.get(report.member_id)
        missed = report.failure in (worker_pb2.PUBLISH_FAILURE_LINK, worker_pb2.PUBLISH_FAILURE_SILENT)
        if missed and member is not None and report.epoch >= member.named_in:
            await self._expel(member, report)


def _version(reported: common_pb2.PolicyVersion) -> Version:
    return Version(reported.session, reported.step)

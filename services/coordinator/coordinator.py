"""Runs and members: which run trains, who works on it, who gets weights.

One owner for each thing: the ledger holds runs and groups, `Members` who is there, this class what follows from
both. Everything runs on one event loop; `lock` serialises transactions with the exchange's. What it decides:

  a run starts    when none is active; its data sets are opened first, and a fault there fails the run alone
  a learner       that joins gets a new session, from the newest complete checkpoint
  a silent worker gives up its tasks, and its leases if they are waited for, before it is given up itself
  an epoch        names the rollout workers that are ready and not pinned by an evaluation, suspected or expelled
  a run ends      when all steps are trained, the learner has exported, and no evaluation is pending
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from paceline.data import PromptSource, open_prompts, open_rows
from paceline.errors import Conflict, DataError, LedgerFault, SpecError
from paceline.example_rows import check_example
from paceline.groups import Version
from paceline.spec import RunSpec
from paceline.spec_io import spec_from_yaml, spec_to_yaml
from paceline.storage import Folder
from paceline.tracing import step_traceparent
from protos.paceline.v1 import common_pb2, worker_pb2
from services.coordinator import evaluation, leases, poison, retention
from services.coordinator.exchange import ActiveRun, Exchange, Notice
from services.coordinator.exchange_server import ExchangeServer
from services.coordinator.journal import Journal
from services.coordinator.ledger import ACTIVE_STATES, Ledger
from services.coordinator.members import Member, Members
from services.coordinator.watchdog import Watchdog

TICK_S = 0.5
HEAR_S = 5.0
"""How long a coordinator that was told to stop listens for workers that were told so too; they say it every second."""

log = logging.getLogger(__name__)


class Coordinator:
    """The run that trains, and the workers on it."""

    def __init__(
        self,
        ledger: Ledger,
        directory: Path,
        members: Members,
        host: str,
        exchange_port: int,
        min_free_bytes: int = 0,
    ):
        self.ledger = ledger
        self.committed = Ledger(ledger.path, read_only=True)
        """What others are told is read here: a transaction under way does not show."""
        self.directory = directory
        self.members = members
        self.lock = asyncio.Lock()
        self.exchange = Exchange(ledger)
        self.journal = Journal(ledger, self.exchange, members)
        self.watchdog = Watchdog(ledger, self.exchange, members, ledger.path.parent, min_free_bytes)
        self.server = ExchangeServer(
            self.exchange, self.lock, self.journal.write_down, self._act_on, host, exchange_port
        )
        self.changed = asyncio.Condition()
        """Notified when events were added or `stopping` was set, for Watch."""
        self.stopping = False
        self._epoch = 0
        self._named: tuple[str, list[str]] = ("", [])
        self._finished_session = 0
        self._fault: LedgerFault | None = None
        ledger.on_fault = self._on_fault

    async def recover(self) -> None:
        """Takes up the run that was active. Before anyone may connect: a worker that asks about a run which is not
        active is told that it is over.
        """
        for row in self.ledger.runs():
            if row["state"] not in ("queued", *ACTIVE_STATES):
                self.journal.summarize_if_missing(row["run_id"])
        self._expect_lease_holders()
        await self._start_next()

    async def run_forever(self) -> None:
        """Starts queued runs and expires silent members, until cancelled. Raises LedgerFault when the disk has refused a
        transaction, whosever it was: a worker that is told of it would only come back for ever.
        """
        while True:
            if self._fault is not None:
                raise self._fault
            await self._start_next()
            for member in self.members.silent(time.monotonic()):
                silent_s = time.monotonic() - member.last_report_s
                # A process that dies closes its stream; one that is stopped or cut off does not.
                await self.leave(member, f"silent for {silent_s:.0f} s", crashed=not member.connected)
            for member in self.members.quiet(time.monotonic()):
                await self._suspect(member, f"silent for {time.monotonic() - member.last_report_s:.0f} s")
            await self._lend_again()
            await self._warn(self.watchdog.look(time.monotonic()))
            self.ledger.remove_unused_segments()
            await asyncio.sleep(TICK_S)

    def _on_fault(self, fault: LedgerFault) -> None:
        self._fault = fault

    # Runs

    async def submit(self, spec_yaml: str, submission: str = "") -> str:
        """Checks a spec and its data sets, and queues a run; returns its id, the same for the same `submission`.

        Raises SpecError, DataError.
        """
        spec = spec_from_yaml(spec_yaml)
        await asyncio.to_thread(_open_data, spec)
        if spec.checkpointing.checkpoint_dir:
            Folder(spec.checkpointing.checkpoint_dir)
        async with self.lock:
            known = self.ledger.run_of_submission(submission) if submission else None
            if known is not None:
                return known
            with self.ledger.transaction():
                run_id = f"{spec.name}-{len(self.ledger.runs()) + 1}"
                directory = self.directory / run_id
                self.ledger.add_run(run_id, spec_to_yaml(spec), str(directory))
                queued = {"state": "queued"} | ({"submission": submission} if submission else {})
                self.ledger.add_event(run_id, "state", queued)
                for warning in spec.warnings:
                    self.ledger.add_event(run_id, "warning", {"message": warning})
            self._make_run_directory(directory, spec)
        log.info("run %s is queued", run_id)
        await self._tell_watchers()
        return run_id

    def _make_run_directory(self, directory: Path, spec: RunSpec) -> None:
        """The run's folder: its spec, and links to what it shares with its neighbours."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "spec.yaml").write_text(spec_to_yaml(spec))
        for shared in (self.ledger.path, self.directory / "logs"):
            link = directory / shared.name
            if shared.exists() and not link.is_symlink():
                link.symlink_to(Path("..") / shared.name)

    async def cancel(self, run_id: str) -> None:
        """Ends a run. Raises NotFound; Conflict when it has ended."""
        row = self.ledger.run(run_id)
        if row["state"] not in ("queued", *ACTIVE_STATES):
            raise Conflict(f"run {run_id} has {row['state']} already")
        await self._end(run_id, "cancelled", "cancelled by request")

    async def hold(self, run_id: str, paused: bool) -> None:
        """Pauses a running run, or resumes a paused one. Raises NotFound, Conflict."""
        before, after = ("running", "paused") if paused else ("paused", "running")
        async with self.lock:
            row = self.ledger.run(run_id)
            if row["state"] != before:
                raise Conflict(f"run {run_id} is {row['state']}, not {before}")
            with self.ledger.transaction():
                self.ledger.update_run(run_id, state=after, message="")
                self.ledger.add_event(run_id, "state", {"state": after})
        self.server.wake("lease", "batch")
        if not paused:
            for learner in self.members.of_role(common_pb2.ROLE_LEARNER):
                learner.failed_run = ""  # it may have paused the run because of a fault
            await self._assign_learner()
        await self._tell_watchers()

    async def _pause_on_fault(self, run_id: str, message: str) -> None:
        """The learner cannot train the step that is due, and nothing is lost: whoever looks into it decides."""
        async with self.lock:
            if self.ledger.run(run_id)["state"] not in ACTIVE_STATES:
                return
            with self.ledger.transaction():
                self.ledger.update_run(run_id, state="paused", message=message)
                self.ledger.add_event(run_id, "state", {"state": "paused", "message": message})
        for learner in self.members.of_role(common_pb2.ROLE_LEARNER):
            learner.session = 0  # its session has ended; resuming begins another
        log.warning("run %s is paused: %s", run_id, message)
        await self._tell_watchers()

    async def _start_next(self) -> None:
        """Makes the active run, or the next queued one, the exchange's run."""
        if self.exchange.active is not None:
            return
        row = self.ledger.active_run() or self.ledger.next_queued()
        if row is None:
            return
        spec, run_id = spec_from_yaml(row["spec_yaml"]), row["run_id"]
        try:
            prompts, validation = await asyncio.to_thread(_open_data, spec)
        except (SpecError, DataError) as error:
            await self._end(run_id, "failed", str(error))
            return
        run = ActiveRun(run_id, spec, prompts, validation)
        async with self.lock:
            row = self.ledger.run(run_id)
            if row["state"] not in ("queued", *ACTIVE_STATES):
                return  # cancelled while its data were opened
            with self.ledger.transaction():
                if row["state"] == "queued":
                    self.ledger.update_run(run_id, state="running")
                    self.ledger.add_event(run_id, "state", {"state": "running"})
                self.exchange.active = run
                if validation is not None and spec.grpo.val_at_start:
                    evaluation.begin(self.exchange, run, 0)
        self.journal.open(run_id, Path(row["directory"]), tensorboard=spec.logger.tensorboard)
        self._finished_session = 0
        log.info("run %s starts at step %d of %d", run_id, row["next_step"], spec.max_num_steps)
        for role in (common_pb2.ROLE_ROLLOUT, common_pb2.ROLE_REWARD):
            for member in self.members.of_role(role):
                self._assign(member)
        await self._assign_learner()
        await self._tell_watchers()

    async def _end(self, run_id: str, state: str, message: str) -> None:
        """Ends a run in `state`; the workers become idle and the next run may start."""
        async with self.lock:
            if self.ledger.run(run_id)["state"] not in ("queued", *ACTIVE_STATES):
                return
            run = self.exchange.active
            active = run is not None and run.run_id == run_id
            with self.ledger.transaction():
                if active and run is not None:
                    self.exchange.end_run(run)
                self.ledger.update_run(run_id, state=state, message=message)
                self.ledger.add_event(run_id, "state", {"state": state, "message": message})
        log.log(
            logging.INFO if state == "succeeded" else logging.WARNING, "run %s %s %s", run_id, state, message
        )
        if active:
            self.journal.close(self.journal.summary(run_id))
            for member in self.members.all():
                member.session, member.ready_run, member.version = 0, "", None
                member.direct(
                    worker_pb2.ConnectResponse(idle=worker_pb2.Idle(reason=f"run {run_id} {state}"))
                )
            self.exchange.versions.clear()
            self._named = ("", [])
            self.server.wake("lease", "task", "batch")
        await self._tell_watchers()

    async def see_off(self, grace_s: float) -> None:
        """Serves on, for `grace_s` seconds at most, until workers that are about to leave have done so.

        What ends the coordinator often ends the workers too, in any order; what they then hand over (unfinished groups,
        scores, a last checkpoint) would have to be made again. Workers that stay see nothing of it.
        """
        started_s = time.monotonic()
        while self.members.all() and (waited_s := time.monotonic() - started_s) < grace_s:
            leaving = [member.member_id for member in self.members.all() if member.draining]
            if waited_s > HEAR_S and not leaving:
                return
            await asyncio.sleep(TICK_S / 5)

    async def end_streams(self) -> None:
        """Ends what would otherwise go on for ever: the workers' streams and the watchers'."""
        self.stopping = True
        for member in self.members.all():
            member.end_stream()
        await self._tell_watchers()

    def close(self) -> None:
        """Closes sockets and files; the ledger is its opener's to close."""
        self.server.close()
        self.journal.close()
        self.committed.close()

    def spec(self, run_id: str) -> RunSpec:
        """The spec of a run. Raises NotFound."""
        return spec_from_yaml(self.committed.run(run_id)["spec_yaml"])

    async def _finish_if_done(self) -> None:
        run = self.exchange.active
        if run is None:
            return
        row = self.ledger.run(run.run_id)
        done = row["next_step"] >= run.spec.max_num_steps and self._finished_session == row["session"]
        if done and evaluation.pending(self.exchange, run) is None:
            await self._end(run.run_id, "succeeded", "")

    async def _act_on(self, notices: list[Notice]) -> None:
        """What follows from a commit: a run that failed or finished, another epoch, news for watchers."""
        run = self.exchange.active
        if run is None:
            return
        for notice in notices:
            if notice.kind == "failed":
                await self._end(run.run_id, "failed", notice.content["message"])
                return
        self._name_epoch()
        await self._tell_watchers()
        await self._finish_if_done()

    # Members

    async def join(self, hello: worker_pb2.Hello) -> Member:
        """A worker joins, or comes back on a new stream."""
        run = self.exchange.active
        same_run = run is not None and hello.run_id == run.run_id
        session = hello.session if same_run else 0
        member = Member(
            hello.member_id,
            hello.role,
            hello.address,
            hello.rank,
            time.monotonic(),
            hello.http_address,
            session=session,
        )
        if same_run and hello.HasField("version"):
            member.version = Version(hello.version.session, hello.version.step)
            self.exchange.versions[member.member_id] = member.version
        earlier = self.members.get(hello.member_id)
        self.members.add(member)
        self.exchange.members.add(member.member_id)
        log.info("%s %s %s", _role(member), member.member_id, "is back" if earlier else "joined")
        if run is not None and member.role != common_pb2.ROLE_LEARNER:
            self._assign(member)
        return member

    async def joined(self, member: Member) -> None:
        """After Welcome is on its way: the rest of what a new member has to know."""
        if member.role == common_pb2.ROLE_LEARNER:
            await self._assign_learner()
            self._named = ("", [])  # a learner that comes back has to be told again who receives weights
        self._name_epoch()
        await self._add_member_event(member, "joined")

    async def disconnected(self, member: Member) -> None:
        """The member's stream broke; it has some time to come back."""
        if self.members.get(member.member_id) is member:
            member.connected = False
            # What was on its way to it is lost; when it is back, it is named and offered again.
            await self._suspect(member, "its stream broke")
            if member.role == common_pb2.ROLE_LEARNER:
                await self._assign_learner()

    async def leave(self, member: Member, reason: str, *, crashed: bool = False) -> None:
        """A member is gone: its leases and tasks go to others, the next epoch is without it."""
        if self.members.get(member.member_id) is not member:
            return
        self.members.remove(member.member_id)
        member.end_stream()
        run = self.exchange.active
        async with self.lock:
            with self.ledger.transaction():
                released = leases.release_member(self.exchange, member.member_id, crashed=crashed)
                if run is not None:
                    evaluation.unpin_member(self.exchange, run, member.member_id)
                notices = self.exchange.take_notices()
                self.journal.write_down(notices)
        log.warning(
            "%s %s left (%s); %d leases taken back", _role(member), member.member_id, reason, released
        )
        self._name_epoch()
        self.server.wake("lease", "task")
        await self._add_member_event(member, f"left: {reason}")
        if member.role == common_pb2.ROLE_LEARNER:
            await self._assign_learner()
        await self._act_on(notices)

    async def report(self, member: Member, request: worker_pb2.ConnectRequest) -> None:
        """Takes one report of a member; one that has left, or came back on another stream, has no say any more."""
        if self.members.get(member.member_id) is not member:
            return
        member.last_report_s = time.monotonic()
        if member.suspected:
            member.suspected = False
            self._name_epoch()
            await self._add_member_event(member, "heard of again")
        match request.WhichOneof("report"):
            case "heartbeat":
                member.gauges = dict(request.heartbeat.gauges)
                member.draining = request.heartbeat.draining
            case "weight_offer":
                receiver = self.members.get(request.weight_offer.member_id)
                if receiver is not None:
                    receiver.direct(worker_pb2.ConnectResponse(weight_offer=request.weight_offer))
            case "weight_ack":
                await self._on_weight_ack(member, request.weight_ack)
            case "run_report":
                await self._on_run_report(member, request.run_report)
            case "checkpoint":
                await self._on_checkpoint(member, request.checkpoint)
            case "staged":
                self.journal.note_staged(request.staged, self._epoch, len(self._named[1]))
            case "publish":
                await self._on_publish(request.publish)
            case "leave":
                reason = request.leave.reason
                await self.leave(member, reason or "in good order", crashed=bool(reason))

    def _assign(self, member: Member) -> None:
        """Puts a rollout or reward worker on the active run."""
        run = self.exchange.active
        assert run is not None
        row = self.ledger.run(run.run_id)
        assignment = worker_pb2.RunAssignment(
            run_id=run.run_id,
            spec_yaml=row["spec_yaml"],
            directory=row["directory"],
            traceparent=step_traceparent(run.run_id, 0),
        )
        if run.prompts is not None:
            member.direct(worker_pb2.ConnectResponse(run=assignment))

    async def _assign_learner(self) -> None:
        """Gives the active run to a learner with a new session, unless a live one has it."""
        run = self.exchange.active
        if run is None:
            return
        async with self.lock:
            row = self.ledger.run(run.run_id)
            learners = [m for m in self.members.of_role(common_pb2.ROLE_LEARNER) if m.rank == 0]
            if any(m.connected and m.session and m.session == row["session"] for m in learners):
                return
            waiting = [m for m in learners if m.connected and m.failed_run != run.run_id]
            if not waiting:
                return
            member, session = waiting[-1], row["session"] + 1
            checkpoint = self.ledger.newest_checkpoint(run.run_id)
            with self.ledger.transaction():
                self.ledger.update_run(run.run_id, session=session)
                self.ledger.add_event(run.run_id, "session", {"session": session})
            member.session = session
        member.direct(
            worker_pb2.ConnectResponse(
                run=worker_pb2.RunAssignment(
                    run_id=run.run_id,
                    spec_yaml=row["spec_yaml"],
                    session=session,
                    start_step=checkpoint["step"] if checkpoint else 0,
                    checkpoint_path=checkpoint["path"] if checkpoint else "",
                    checkpoint_sha256=checkpoint["sha256"] if checkpoint else "",
                    chain=checkpoint["chain"] if checkpoint else "",
                    publish_from_step=max(0, row["published_step"]),
                    directory=row["directory"],
                    traceparent=step_traceparent(run.run_id, 0),
                )
            )
        )
        self._named = ("", [])
        self._name_epoch()

    def _name_epoch(self) -> None:
        """Tells the learner who receives weights, when that has changed."""
        run = self.exchange.active
        if run is None:
            return
        pinned = evaluation.pinned_member(self.exchange, run)
        named = [
            member.member_id
            for member in self.members.of_role(common_pb2.ROLE_ROLLOUT)
            if member.ready_run == run.run_id
            and member.connected
            and not member.suspected
            and not member.expelled
            and member.member_id != pinned
        ]
        if (run.run_id, named) == self._named:
            return
        before, self._named = self._named[1], (run.run_id, named)
        self._epoch += 1
        for member_id in set(named) - set(before):
            if (newcomer := self.members.get(member_id)) is not None:
                newcomer.named_in = self._epoch
        log.info("epoch %d of run %s: %s", self._epoch, run.run_id, ", ".join(named) or "nobody")
        directive = worker_pb2.Epoch(run_id=run.run_id, number=self._epoch, member_ids=named)
        for learner in self.members.of_role(common_pb2.ROLE_LEARNER):
            learner.direct(worker_pb2.ConnectResponse(epoch=directive))

    async def _on_weight_ack(self, member: Member, ack: worker_pb2.WeightAck) -> None:
        run = self.exchange.active
        if run is not None and ack.run_id == run.run_id and ack.ok:
            member.version = Version(ack.version.session, ack.version.step)
            self.exchange.versions[member.member_id] = member.version
            self.journal.note_pause(ack)
            async with self.lock:
                if ack.version.step > self.ledger.run(run.run_id)["published_step"]:
                    with self.ledger.transaction():
                        self.ledger.update_run(run.run_id, published_step=ack.version.step)
            self.server.wake("lease")
        for learner in self.members.of_role(common_pb2.ROLE_LEARNER):
            learner.direct(worker_pb2.ConnectResponse(weight_ack=ack))

    async def _on_run_report(self, member: Member, report: worker_pb2.RunReport) -> None:
        run = self.exchange.active
        if run is None or report.run_id != run.run_id:
            return
        if (
            member.role == common_pb2.ROLE_LEARNER
            and report.session != self.ledger.run(run.run_id)["session"]
        ):
            return  # a learner that another one has replaced
        if report.warning:
            await self._warn([report.warning])
            return
        if report.error:
            member.failed_run = run.run_id
            peers = self.members.of_role(member.role)
            log.warning(
                "%s %s cannot work on %s: %s", _role(member), member.member_id, run.run_id, report.error
            )
            if all(peer.failed_run == run.run_id for peer in peers) and report.resumable:
                await self._pause_on_fault(run.run_id, f"{_role(member)}: {report.error}")
            elif all(peer.failed_run == run.run_id for peer in peers):
                await self._end(run.run_id, "failed", f"{_role(member)}: {report.error}")
            return
        member.ready_run, member.expelled = run.run_id, False
        if report.finished:
            async with self.lock:
                with self.ledger.transaction():
                    self.ledger.update_run(run.run_id, export_path=report.export_path)
            self._finished_session = report.session
            await self._finish_if_done()
        self._name_epoch()

    async def _on_checkpoint(self, member: Member, report: worker_pb2.CheckpointReport) -> None:
        async with self.lock:
            with self.ledger.transaction():
                # One that is known is what a learner says again after a restart: no news.
                if self.ledger.add_checkpoint(report):
                    content = {"step": report.step, "path": report.path, "seconds": report.seconds}
                    self.ledger.add_event(report.run_id, "checkpoint", content)
                run = self.exchange.active
                if run is not None and run.run_id == report.run_id:
                    retention.forget_surplus(self.ledger, run.run_id, run.spec.checkpointing)
            kept = retention.kept_paths(self.ledger, report.run_id)
        directive = worker_pb2.KeepCheckpoints(run_id=report.run_id, paths=kept)
        member.direct(worker_pb2.ConnectResponse(keep_checkpoints=directive))
        await self._tell_watchers()

    async def _on_publish(self, report: worker_pb2.PublishReport) -> None:
        self.journal.note_publish(report)
        if report.ok:
            return
        log.warning("version %d did not reach %s: %s", report.version.step, report.member_id, report.error)
        member = self.members.get(report.member_id)
        missed = report.failure in (worker_pb2.PUBLISH_FAILURE_LINK, worker_pb2.PUBLISH_FAILURE_SILENT)
        if missed and member is not None and report.epoch >= member.named_in:
            await self._expel(member, report)

    async def _suspect(self, member: Member, why: str) -> None:
        """A member may be gone: the next epoch is without it, and it is back in one as soon as it is heard of."""
        if member.suspected or self.stopping:
            return
        member.suspected = True
        log.warning("%s %s is suspected: %s", _role(member), member.member_id, why)
        self._name_epoch()
        await self._add_member_event(member, f"suspected: {why}")

    async def _lend_again(self) -> None:
        """Lends what silent workers hold to others before their time-out: score tasks at once, leases when the learner waits,
        as generating twice costs more. Not where the stream broke: that may be a crash, which what they hold may have caused.
        """
        silent = [member.member_id for member in self.members.all() if member.suspected and member.connected]
        run = self.exchange.active
        if run is None or not silent:
            return
        async with self.lock:
            if not self.ledger.held().keys() & set(silent):
                return
            with self.ledger.transaction():
                number = leases.lend_again(
                    self.exchange, silent, with_leases=self.exchange.learner_waits(run)
                )
        if number:
            log.info("%d groups of silent workers are lent again: %s", number, ", ".join(silent))
            self.server.wake("lease", "task")

    async def _expel(self, member: Member, report: worker_pb2.PublishReport) -> None:
        """A member missed a deadline of its weight link: the next epoch is without it, and it is told so."""
        if member.expelled:
            return
        member.expelled = True
        log.warning("%s %s is expelled from epoch %d", _role(member), member.member_id, report.epoch)
        expelled = worker_pb2.Expelled(run_id=report.run_id, epoch=report.epoch, reason=report.error)
        member.direct(worker_pb2.ConnectResponse(expelled=expelled))
        self._name_epoch()
        await self._add_member_event(member, f"expelled from epoch {report.epoch}: {report.error}")

    async def _add_member_event(self, member: Member, what: str) -> None:
        run = self.exchange.active
        if run is not None:
            async with self.lock:
                with self.ledger.transaction():
                    if what == "joined":
                        poison.forgive(self.exchange, member.member_id)
                    self.ledger.add_event(
                        run.run_id,
                        "member",
                        {"role": _role(member), "member_id": member.member_id, "what": what},
                    )
            await self._tell_watchers()

    async def _warn(self, messages: list[str]) -> None:
        run = self.exchange.active
        if run is None or not messages:
            return
        async with self.lock:
            with self.ledger.transaction():
                self.journal.write_down([Notice("warning", {"message": message}) for message in messages])
        self.server.wake("lease")
        await self._tell_watchers()

    def _expect_lease_holders(self) -> None:
        """After a restart: whoever holds leases has the usual time to come back before they are taken away."""
        for member_id, role in self.ledger.holders():
            # As if its stream stood: one that broke would have half the time, less than a worker's longest back-off.
            self.members.add(Member(member_id, role, "", 0, time.monotonic()))

    async def _tell_watchers(self) -> None:
        async with self.changed:
            self.changed.notify_all()


def _open_data(spec: RunSpec) -> tuple[PromptSource | None, PromptSource | None]:
    """Training and validation prompts of a run; data of examples are only checked: the learner reads them. Raises
    DataError."""
    data = spec.data
    if spec.examples is not None:
        check = check_example(spec)
        open_rows(data.train, data.train_split, check=check)
        if spec.examples.validates and data.validation is not None:
            open_rows(data.validation, data.validation_split, "data.validation", check)
        return None, None
    prompts = open_prompts(spec.data, spec.seed)
    return prompts, open_prompts(spec.data, spec.seed, validation=True) if spec.data.validation else None


def _role(member: Member) -> str:
    return common_pb2.Role.Name(member.role).removeprefix("ROLE_").lower()

"""The learner's work on one run, as each rank does it: next batch, train, publish, receipt, checkpoint.

All ranks go through the same collectives in the same order: `_agree` before every step (is every rank's part here?
has the run ended? was a checkpoint or an export ordered?), then the step's own, then gathering for publishing,
checkpoint or export. Publishing to members happens on rank 0's link threads, from a staged copy, while the next step
trains. Nothing here waits for a rollout worker.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from learner import checkpoint as checkpoints
from learner.adapter import export_adapter
from learner.batch import TrainSequence, sequences_from_groups
from learner.channel import WeightChannel
from learner.checkpoint_writer import CheckpointWriter
from learner.collectives import broadcast_bytes, max_over_ranks
from learner.examples import ExampleSource
from learner.export import export_pretrained
from learner.gather import gather_merged, gather_weights
from learner.row_check import check_rows
from learner.trainer import Trainer
from paceline.errors import Conflict, NonFiniteLoss, PacelineError, Unavailable
from paceline.groups import Version
from paceline.prompts import load_tokenizer
from paceline.spec import RunSpec
from paceline.spec_io import spec_from_yaml
from paceline.tracing import span, step_traceparent
from paceline.wire import decode_group
from protos.paceline.v1 import exchange_pb2 as pb
from protos.paceline.v1 import worker_pb2
from services.learner_weights import make_channel

if TYPE_CHECKING:
    from services.learner_rank import LearnerRank

BATCH_WAIT_S = 5.0
LAST_SAVE_PAUSES_S = (2.0, 5.0, 10.0, 20.0, 60.0, 0.0)
"""Before each further try at the last checkpoint."""

REQUEST_TIMEOUT_S = 3600.0
"""The coordinator may be gone for long; the request waits for it. The learner has nothing else to do."""

log = logging.getLogger(__name__)


class LearnerRun:
    """One session on one run, on one rank."""

    def __init__(self, assignment: worker_pb2.RunAssignment, rank: LearnerRank):
        self.run_id = assignment.run_id
        self.session = assignment.session
        self.step = assignment.start_step
        self.phase = "loading"
        self.out_of_step = False
        """Whether this rank failed where others may not have, so that their collectives would never meet again."""
        self._assignment = assignment
        self._rank = rank
        self._spec: RunSpec = spec_from_yaml(assignment.spec_yaml)
        self._chain = assignment.chain
        self._superseded = threading.Event()
        self._channel: WeightChannel | None = None
        self._receivers = threading.Lock()
        self._examples: ExampleSource | None = None
        self._held_out: ExampleSource | None = None
        self._newest = (assignment.checkpoint_path, assignment.start_step)
        """Path and step of the newest complete checkpoint; kept up to date on rank 0."""
        self._reports: list[worker_pb2.ConnectRequest] = []
        elsewhere = self._spec.checkpointing.checkpoint_dir
        # Names of checkpoints are unique within a run only, and pruning must not see another run's.
        self._directory = f"{elsewhere}/{self.run_id}" if elsewhere else f"{assignment.directory}/checkpoints"
        self._writer = CheckpointWriter(self._directory, assignment.session)
        self._deleting = ThreadPoolExecutor(1, "delete checkpoints")

    @property
    def spec(self) -> RunSpec:
        """What is trained."""
        return self._spec

    def train(self) -> None:
        """From the assignment to the end of the run (or of this session). Faults of the run are reported, not raised."""
        try:
            self._set_up()
        except PacelineError as error:
            self._fail(str(error))
            return
        self._report(
            worker_pb2.ConnectRequest(
                run_report=worker_pb2.RunReport(run_id=self.run_id, session=self.session)
            )
        )
        self._publish(last=False)
        try:
            while self.step < self._spec.max_num_steps:
                part = self._next_part()
                if part is None:
                    return
                self._train_step(part)
            self._finish()
        except NonFiniteLoss as error:  # raised on every rank, so they are still at one point
            self._fail(
                f"step {self.step} was stopped before the optimizer: {error}. `paceline resume {self.run_id}` trains on from "
                "the newest checkpoint; policy.skip_non_finite_updates leaves such updates out",
                resumable=True,
            )
        except PacelineError as error:
            self._fail(str(error))
            self.out_of_step = self._rank.world_size > 1

    def close(self) -> None:
        """Ends publishing; orders that came too late are refused."""
        self._rank.orders.refuse_all(f"run {self.run_id} has ended")
        with contextlib.suppress(PacelineError):
            self._writer.finish()  # nobody asks for it any more; but its thread must not run into the next run
        self._deleting.shutdown()
        if self._channel is not None:
            self._channel.close()

    # From the control plane's thread

    def supersede(self) -> None:
        """Another run, or none: end this one after the current step."""
        self._superseded.set()

    def set_members(self, epoch: worker_pb2.Epoch) -> None:
        """Who receives weights from now on."""
        if epoch.run_id == self.run_id:
            with self._receivers:
                self._epoch = epoch
                if self._channel is not None:
                    with contextlib.suppress(Conflict):  # the run ends at this very moment
                        self._channel.set_members(epoch.number, epoch.member_ids)

    def acknowledge(self, ack: worker_pb2.WeightAck) -> None:
        """A member's answer to an offer."""
        if self._channel is not None and ack.run_id == self.run_id:
            version = Version(ack.version.session, ack.version.step)
            self._channel.acknowledge(ack.member_id, version, ack.ok, ack.message, ack.damaged)

    def keep_checkpoints(self, order: worker_pb2.KeepCheckpoints) -> None:
        """The ledger has forgotten all older checkpoints but these: they are deleted while training goes on."""
        if order.run_id == self.run_id:
            with contextlib.suppress(RuntimeError):  # the run ends at this very moment
                self._deleting.submit(self._delete_all_but, list(order.paths))

    def report_again(self) -> None:
        """The coordinator was away: what it must know may have been lost with the stream."""
        for report in self._reports:
            self._rank.report(report)
        if self._channel is not None:
            self._channel.interrupt("the coordinator was away")

    _epoch: worker_pb2.Epoch | None = None

    # Set-up

    def _set_up(self) -> None:
        spec, start = self._spec, self._assignment.start_step
        torch.manual_seed(spec.seed)
        self._trainer = Trainer(spec, self._rank.device)
        self._tokenizer = load_tokenizer(spec.policy)
        if self._assignment.checkpoint_path:
            checkpoints.load(
                self._assignment.checkpoint_path,
                expected_sha256=self._assignment.checkpoint_sha256,
                model=self._trainer.model,
                optimizer=self._trainer.optimizer,
                critic=self._trainer.critic,
            )
            log.info("session %d goes on from step %d", self.session, start)
        if spec.examples is not None:
            self._examples = ExampleSource(spec, self._tokenizer)
            if spec.examples.validates:
                self._held_out = ExampleSource(spec, self._tokenizer, validation=True)
            for source in (self._examples, self._held_out):
                if source is not None and start == 0:  # later sessions train what an earlier one has checked
                    check_rows(source, self._rank.device, self._rank.rank)
                if source is not None:
                    self._trainer.reference.prepare(source, self._rank.rank)
        else:
            self._set_up_channel()

    def _set_up_channel(self) -> None:
        channel = make_channel(self._assignment, spec=self._spec, rank=self._rank)
        with self._receivers:
            epoch = self._epoch or self._rank.early_epoch
            if epoch is not None and epoch.run_id == self.run_id:
                channel.set_members(epoch.number, epoch.member_ids)
            self._channel = channel

    # One step

    def _next_part(self) -> pb.BatchReply | None:
        """This rank's part of the next batch, once every rank has its own; None when the run has ended."""
        self.phase = "waiting"
        part: pb.BatchReply | None = None
        payloads: list[bytes] = []
        while True:
            if part is None:
                with span("wait", step_traceparent(self.run_id, self.step), step=self.step):
                    part, payloads = self._ask_for_part()
            orders = self._rank.orders
            missing, ended, stopping, checkpoint, export, unwritten, anchor = self._agree(
                part is None,
                part is not None and part.state == pb.BATCH_STATE_END,
                self._rank.stopping.is_set(),
                bool(orders.checkpoint),
                bool(orders.export),
                self._writer.in_progress and not self._writer.ready,
                self._channel is not None and self._channel.wants_anchor,
            )
            if anchor and self._channel is not None:
                self._channel.write_anchor()
            if not unwritten:
                self._finish_save()
            if checkpoint:
                self._save_ordered()
            if export:
                self._export_ordered()
            if stopping and not ended:
                self._rank.stop()
                self._begin_save()
                self._finish_save()
            if ended or stopping:
                return None
            if not missing:
                self._payloads = payloads
                return part

    def _ask_for_part(self) -> tuple[pb.BatchReply | None, list[bytes]]:
        asked = pb.BatchRequest(
            step=self.step, rank=self._rank.rank, world_size=self._rank.world_size, wait_s=BATCH_WAIT_S
        )
        reply, payloads = self._request(
            pb.ExchangeRequest(run_id=self.run_id, session=self.session, batch=asked)
        )
        if reply.status == pb.REPLY_STATUS_STALE or self._superseded.is_set():
            return pb.BatchReply(state=pb.BATCH_STATE_END), []
        if reply.status != pb.REPLY_STATUS_OK:
            raise PacelineError(f"the exchange refused the request for step {self.step}: {reply.message}")
        return (None if reply.batch.state == pb.BATCH_STATE_WAIT else reply.batch), payloads

    def _agree(self, *facts: bool) -> list[bool]:
        """Each fact, if it is true on any rank."""
        facts_F = torch.tensor([int(fact) for fact in facts], device=self._rank.device)
        return [bool(fact) for fact in max_over_ranks(facts_F).tolist()]

    def _train_step(self, part: pb.BatchReply) -> None:
        self.phase = "training"
        with span("train", part.traceparent, step=self.step, rank=self._rank.rank):
            sequences = self._sequences(part)
            before = self._validate() if self.step == 0 else {}
            metrics = self._trainer.train_step(sequences, self.step)
        for skipped in self._trainer.skipped:
            self._warn(f"step {self.step}: an update was left out, {skipped}")
        metrics["learner/tokens_per_s"] = metrics["tokens"] / metrics["step_s"]
        self._chain = part.chain
        self.step += 1
        metrics |= {f"validation_before/{name}": value for name, value in before.items()}
        metrics |= {f"validation/{name}": value for name, value in self._validate().items()}
        last = self.step == self._spec.max_num_steps
        if last or self.step % self._spec.weights.publish_interval == 0:
            started_s = time.perf_counter()
            with span("publish", part.traceparent, step=self.step):
                self._publish(last)
            metrics["publish_wait_s"] = time.perf_counter() - started_s
        self._send_receipt(part, sequences, metrics)
        if self._spec.checkpointing.enabled and (
            last or self.step % self._spec.checkpointing.save_period == 0
        ):
            self._begin_save()

    def _validate(self) -> dict[str, float]:
        """The objective on the held-out examples, where the spec wants it for the current version."""
        if (
            self._held_out is None
            or self._spec.examples is None
            or not self._spec.examples.val_due(self.step)
        ):
            return {}
        rank = self._rank
        return self._trainer.evaluate(self._held_out.held_out(rank.rank, rank.world_size))

    def _sequences(self, part: pb.BatchReply) -> list[TrainSequence]:
        if self._examples is not None:
            return self._examples.part(self.step, self._rank.rank, self._rank.world_size)
        groups = []
        for place, group in enumerate(part.groups):
            reference = self._payloads[group.reference_frame - 1] if group.reference_frame else None
            groups.append(decode_group(group.group_id, self._payloads[place], group.rewards, reference))
        return sequences_from_groups(groups, self._spec)

    def _send_receipt(
        self, part: pb.BatchReply, sequences: list[TrainSequence], metrics: dict[str, float]
    ) -> None:
        receipt = pb.Receipt(
            step=self.step - 1,
            rank=self._rank.rank,
            world_size=self._rank.world_size,
            groups=[pb.BatchGroup(group_id=group.group_id, digest=group.digest) for group in part.groups],
            tokens=sum(len(sequence.completion_ids) for sequence in sequences),
            metrics=metrics if self._rank.rank == 0 else {},
        )
        request = pb.ExchangeRequest(run_id=self.run_id, session=self.session, receipt=receipt)
        reply, _ = self._request(request)
        if reply.status == pb.REPLY_STATUS_INVALID:
            raise PacelineError(f"the receipt of step {self.step - 1} was refused: {reply.message}")
        if reply.status == pb.REPLY_STATUS_STALE:
            self._superseded.set()

    def _request(self, request: pb.ExchangeRequest) -> tuple[pb.ExchangeReply, list[bytes]]:
        """The exchange's answer, however long it is away; told to stop, a rank waits no longer than its grace."""
        rank = self._rank
        try:
            return rank.background.wait(
                rank.membership.request(request), REQUEST_TIMEOUT_S, rank.stopping, rank.grace_s
            )
        except TimeoutError:
            raise Unavailable("the coordinator did not answer before this rank had to go") from None

    # What a step leaves behind

    def _publish(self, last: bool) -> None:
        """All ranks copy what they have to; the rest happens while the next step trains. Replayed steps are not published."""
        if self._channel is None or (self.step < self._assignment.publish_from_step and not last):
            return
        self._channel.publish(Version(self.session, self.step), self._trainer.model)

    def _begin_save(self) -> None:
        """Starts a checkpoint after the current step; its files are written while the next steps train."""
        if self.step == (self._assignment.start_step if self._assignment.checkpoint_path else -1):
            return  # it is what this session came from
        if self.step == self._writer.step:
            return
        self._finish_save()
        phase, self.phase = self.phase, "saving"
        trainer = self._trainer
        self._writer.begin(self.step, trainer.model, trainer.optimizer, self._chain, trainer.critic)
        self.phase = phase

    def _finish_save(self) -> str:
        """Waits for the checkpoint in the making, if there is one, and registers it with the coordinator.

        Returns why it could not be written, on the ranks that know: the run goes on, and the next one is tried.
        """
        if not self._writer.in_progress:
            return ""
        phase, self.phase = self.phase, "saving"
        try:
            saved = self._writer.finish()
        except (Unavailable, OSError) as error:
            self._warn(f"no checkpoint of step {self._writer.step}: {error}; the run goes on without it")
            return str(error)
        finally:
            self.phase = phase
        if saved is None:
            return ""
        self._newest = (str(saved.path), saved.manifest.step)
        self._report(
            worker_pb2.ConnectRequest(
                checkpoint=worker_pb2.CheckpointReport(
                    run_id=self.run_id,
                    session=self.session,
                    step=saved.manifest.step,
                    path=str(saved.path),
                    sha256=saved.manifest_sha256,
                    chain=saved.manifest.chain_hash,
                    seconds=self._writer.seconds,
                )
            )
        )
        return ""

    def _save_last(self) -> None:
        """The last step's checkpoint, for which no later one makes up: tried again while the disk may be full."""
        for pause_s in LAST_SAVE_PAUSES_S:
            if not self._agree(bool(self._finish_save()))[0]:
                return
            if pause_s:
                self._superseded.wait(pause_s)
                self._writer.step = -1
                self._begin_save()
        raise Unavailable(
            f"the checkpoint of step {self.step}, the last one, could not be written; see the log"
        )

    def _warn(self, message: str) -> None:
        log.warning("run %s: %s", self.run_id, message)
        if self._rank.rank == 0:
            warned = worker_pb2.RunReport(run_id=self.run_id, session=self.session, warning=message)
            self._rank.report(worker_pb2.ConnectRequest(run_report=warned))

    def _delete_all_but(self, kept: list[str]) -> None:
        try:
            checkpoints.prune(self._directory, kept)
        except OSError as error:
            log.warning("old checkpoints could not be deleted: %s; the next one tries again", error)

    def _save_ordered(self) -> None:
        self._begin_save()
        failure = self._finish_save()
        for order in self._rank.orders.take_checkpoints():
            if failure:
                order.set_exception(Unavailable(failure))
            else:
                order.set_result(self._newest)

    def _export_ordered(self) -> None:
        """One export for all orders of this moment, as the first one wants it."""
        orders = self._rank.orders.take_exports()
        wanted = broadcast_bytes(json.dumps(orders[0][0] if orders else []).encode())
        name, adapter_only = json.loads(wanted)
        path = self._export(Path(self._assignment.directory) / name, adapter_only)
        for _, order in orders:
            order.set_result(path)

    def _export(self, path: Path, adapter_only: bool = False) -> str:
        """The current weights as a Hugging Face folder; replaces what this run exported there before."""
        model = self._trainer.model
        tensors = gather_weights(model, None) if adapter_only else gather_merged(model)
        if self._rank.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            policy = self._spec.policy
            if adapter_only:
                export_adapter(path, tensors, policy.lora_cfg, policy.model_name)
                return str(path)
            export_pretrained(
                path,
                tensors,
                model_name=policy.model_name,
                tokenizer_name=policy.tokenizer_name,
                scoring=self._spec.algorithm == "rm",
            )
        return str(path)

    def _finish(self) -> None:
        """Every step is trained: export, say so, and serve members with the last version until the run ends."""
        path = self._export(Path(self._assignment.directory) / "export")
        self._save_last()
        finished = worker_pb2.RunReport(
            run_id=self.run_id, session=self.session, finished=True, export_path=path
        )
        if self._rank.rank == 0:
            self._report(worker_pb2.ConnectRequest(run_report=finished))
        self._next_part()

    def _fail(self, message: str, *, resumable: bool = False) -> None:
        log.error("run %s: %s", self.run_id, message)
        failed = worker_pb2.RunReport(
            run_id=self.run_id, session=self.session, error=message, resumable=resumable
        )
        self._rank.report(worker_pb2.ConnectRequest(run_report=failed))

    def _report(self, report: worker_pb2.ConnectRequest) -> None:
        if self._rank.rank == 0:
            kind = report.WhichOneof("report")
            self._reports = [r for r in self._reports if r.WhichOneof("report") != kind] + [report]
            self._rank.report(report)

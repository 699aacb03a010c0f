"""The learner's work on one run, as each rank does it: next batch, train, publish, receipt, checkpoint.

All ranks go through the same collectives in the same order: they agree before every step (is every rank's part here?
has the run ended? was a checkpoint or an export ordered?), then the step's own, then gathering for publishing,
checkpoint or export. Publishing to members happens on rank 0's link threads, from a staged copy, while the next step
trains. Nothing here waits for a rollout worker.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError

from learner.batch.examples import ExampleSource
from learner.batch.samples import TrainingSample, sequences_from_groups
from learner.batch.validate_examples import check_rows
from learner.checkpoints.checkpoint import Misfit
from learner.checkpoints.export import export_policy
from learner.checkpoints.export_folder import remove_left_overs
from learner.collectives import FailedElsewhere, any_over_ranks, broadcast_bytes, succeed_on_all_ranks
from learner.step.trainer import Trainer
from learner.weights.channel import WeightChannel
from learner.weights.gather import gather_export, merged_export
from paceline.data.tokens import load_tokenizer
from paceline.errors import CheckpointFault, Conflict, NonFiniteLoss, PacelineError, Unavailable
from paceline.files.names import EXPORT, EXPORTS
from paceline.groups import Version
from paceline.spec import RunSpec
from paceline.tracing import span, step_traceparent
from protos.paceline.v1 import worker_pb2
from services.common.run_setup import failed_set_up, spec_of
from services.learner.batches import Part, Parts
from services.learner.checkpoints import NotShared, SessionCheckpoints
from services.learner.context import RankContext
from services.learner.run_reports import Rank0RunReports, RunReports
from services.learner.step_failure import describe
from services.learner.weights import make_channel

log = logging.getLogger(__name__)


class LearnerRun:
    """One session on one run, on one rank. Raises Unavailable for a spec that this version does not understand."""

    def __init__(self, assignment: worker_pb2.RunAssignment, rank: RankContext):
        self.run_id = assignment.run_id
        self.session = assignment.session
        self.step = assignment.start_step
        self.ready = False
        """Whether the set-up has succeeded."""
        self.out_of_step = False
        """Whether this rank failed where others may not have, so that their collectives would never meet again."""
        self._assignment = assignment
        self._rank = rank
        self._spec: RunSpec = spec_of(assignment)
        self._phase = "loading"
        self._chain = assignment.chain
        reports = Rank0RunReports if rank.rank == 0 else RunReports
        self._reports = reports(assignment.run_id, assignment.session, rank.report)
        self._parts = Parts(assignment.run_id, assignment.session, rank)
        self._checkpoints = SessionCheckpoints(
            assignment, self._spec.checkpointing, self._reports.keep, self._reports.warn
        )
        self._channel: WeightChannel | None = None
        self._receivers = threading.Lock()
        self._examples: ExampleSource | None = None
        self._held_out: ExampleSource | None = None
        self._longest = 0
        """Tokens of the longest sequence in this rank's last part."""

    @property
    def spec(self) -> RunSpec:
        """What is trained."""
        return self._spec

    @property
    def receipted(self) -> int:
        """Steps up to which the coordinator has this rank's receipts; 0 before the session's first."""
        return self._parts.receipted

    @property
    def phase(self) -> str:
        """`loading`, `waiting` for a batch, `training` or `saving`: what the main thread does now."""
        return "saving" if self._checkpoints.saving else self._phase

    def train(self) -> None:
        """From the assignment to the end of the run (or of this session). Faults of the run are reported, not raised."""
        try:
            self._set_up()
        except FailedElsewhere as error:
            log.error("run %s: %s", self.run_id, error)  # the rank that failed reports why
            return
        except CheckpointFault as error:
            self._fail(str(error), fault=worker_pb2.FAULT_CHECKPOINT, checkpoint_path=error.path)
            return
        except (Misfit, NotShared) as error:
            self._fail(str(error), resumable=True)
            return
        except Exception as error:  # raised on every rank, so they are at one point and may try again
            self._rank.report(failed_set_up(self.run_id, error, self.session))
            return
        self.ready = True
        self._reports.say(vocab_size=self._vocabulary)
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
        except Unavailable as error:
            self._fail(str(error), fault=worker_pb2.FAULT_PASSING)
            self.out_of_step = self._rank.world_size > 1
        except Exception as error:
            self._end_at_step(error)

    def close(self) -> None:
        """Ends publishing; orders that came too late are refused."""
        self._rank.orders.refuse_all(f"run {self.run_id} has ended")
        self._checkpoints.close()
        if self._channel is not None:
            self._channel.close()

    # From the control plane's thread

    def supersede(self) -> None:
        """Another run, or none: end this one after the current step."""
        self._parts.superseded.set()

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

    def progress(self, progress: worker_pb2.WeightProgress) -> None:
        """A member still works on what it was offered."""
        if self._channel is not None and progress.run_id == self.run_id:
            version = Version(progress.version.session, progress.version.step)
            self._channel.progress(progress.member_id, version)

    def keep_checkpoints(self, order: worker_pb2.KeepCheckpoints) -> None:
        """Which checkpoints the ledger still knows."""
        if order.run_id == self.run_id:
            self._checkpoints.keep_only(list(order.paths))

    def report_again(self) -> None:
        """The coordinator was away: what it must know may have been lost with the stream."""
        self._reports.repeat()
        if self._channel is not None:
            self._channel.interrupt("the coordinator was away")

    _epoch: worker_pb2.Epoch | None = None

    # Set-up

    def _set_up(self) -> None:
        """Collective: a rank that cannot read something would leave the others in their next collective, so all agree first.
        What raises later does so on every rank."""
        spec, start = self._spec, self._assignment.start_step
        self._checkpoints.look_around(self._rank.device, self._rank.stopping.wait)
        succeed_on_all_ranks(self._read, self._rank.device)
        self._checkpoints.load(self._trainer, self._rank.stopping.wait)
        if spec.examples is not None:
            for source in (self._examples, self._held_out):
                if source is not None and start == 0:  # later sessions train what an earlier one has checked
                    check_rows(source, self._rank.device, self._rank.rank)
                if source is not None:
                    self._trainer.reference.prepare(source, self._rank.rank)
        else:
            self._set_up_channel()

    def _read(self) -> None:
        """Everything that the spec names, without a word to the other ranks. Rank 0 tidies up after exports that were killed."""
        spec, directory = self._spec, Path(self._assignment.directory)
        if self._rank.rank == 0:
            for folder in (directory, directory / EXPORTS):
                remove_left_overs(folder)
        torch.manual_seed(spec.seed)
        self._trainer = Trainer(spec, self._rank.device)
        self._tokenizer = load_tokenizer(spec.policy)
        if spec.examples is not None:
            objective = self._trainer.objective
            self._examples = ExampleSource(spec, self._tokenizer, objective)
            if spec.examples.validates:
                self._held_out = ExampleSource(spec, self._tokenizer, objective, validation=True)

    def _set_up_channel(self) -> None:
        channel = make_channel(self._assignment, self._spec, self._rank, self._reports.warn)
        with self._receivers:
            epoch = self._epoch or self._rank.early_epoch
            if epoch is not None and epoch.run_id == self.run_id:
                channel.set_members(epoch.number, epoch.member_ids)
            self._channel = channel

    # One step

    def _next_part(self) -> Part | None:
        """This rank's part of the next batch, once every rank has its own; None when the run has ended."""
        self._phase = "waiting"
        part: Part | None = None
        while True:
            if part is None:
                with span("wait", step_traceparent(self.run_id, self.step), step=self.step):
                    part = self._parts.ask(self.step)
            orders = self._rank.orders
            missing, ended, stopping, checkpoint, export, unwritten, anchor = any_over_ranks(
                [
                    part is None,
                    part is not None and part.is_end,
                    self._rank.stopping.is_set(),
                    bool(orders.checkpoint),
                    bool(orders.export),
                    self._checkpoints.unwritten,
                    self._channel is not None and self._channel.wants_anchor,
                ],
                self._rank.device,
            )
            if anchor and self._channel is not None:
                self._channel.write_anchor()
            if not unwritten:
                self._checkpoints.finish()
            if checkpoint:
                self._save_ordered()
            if export:
                self._export_ordered()
            if stopping and not ended:
                self._rank.stop()
                self._begin_save()
                self._checkpoints.finish()
            if ended or stopping:
                return None
            if missing or part is None:
                continue
            if self._is_one_batch(part):
                return part
            part = None

    def _is_one_batch(self, part: Part) -> bool:
        """Whether all ranks have parts of one batch: it may have been fixed anew after the first ranks got theirs."""
        if self._rank.world_size == 1:
            return True
        first = broadcast_bytes(part.batch.chain.encode()).decode()
        (differs,) = any_over_ranks([part.batch.chain != first], self._rank.device)
        return not differs

    def _train_step(self, part: Part) -> None:
        self._phase, traceparent = "training", part.batch.traceparent
        with span("train", traceparent, step=self.step, rank=self._rank.rank):
            sequences = self._sequences(part)
            self._longest = max(
                (len(one.prompt_ids) + len(one.completion_ids) for one in sequences), default=0
            )
            before = self._validate() if self.step == 0 else {}
            metrics = self._trainer.train_step(sequences, self.step)
        for skipped in self._trainer.skipped:
            self._reports.warn(f"step {self.step}: an update was left out, {skipped}")
        metrics["learner/tokens_per_s"] = metrics["tokens"] / metrics["step_s"]
        self._chain = part.batch.chain
        self.step += 1
        metrics |= {f"validation_before/{name}": value for name, value in before.items()}
        metrics |= {f"validation/{name}": value for name, value in self._validate().items()}
        last = self.step == self._spec.max_num_steps
        if last or self.step % self._spec.weights.publish_interval == 0:
            started_s = time.perf_counter()
            with span("publish", traceparent, step=self.step):
                self._publish(last)
            metrics["publish_wait_s"] = time.perf_counter() - started_s
        tokens = sum(len(sequence.completion_ids) for sequence in sequences)
        self._parts.send_receipt(part, self.step - 1, tokens, metrics)
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

    def _sequences(self, part: Part) -> list[TrainingSample]:
        if self._examples is not None:
            return self._examples.part(self.step, self._rank.rank, self._rank.world_size)
        return sequences_from_groups(part.groups, self._spec)

    # What a step leaves behind

    def _publish(self, last: bool) -> None:
        """All ranks copy what they have to; the rest happens while the next step trains. Replayed steps are not published."""
        if self._channel is None or (self.step < self._assignment.publish_from_step and not last):
            return
        self._channel.publish(Version(self.session, self.step), self._trainer.model)

    def _begin_save(self) -> None:
        self._checkpoints.begin(self._trainer, self.step, self._chain)

    def _save_ordered(self) -> None:
        self._begin_save()
        failure = self._checkpoints.finish()
        for order in self._rank.orders.take_checkpoints():
            if failure:
                order.set_exception(Unavailable(failure))
            else:
                order.set_result(self._checkpoints.newest)

    def _export_ordered(self) -> None:
        """One export for all orders that want the same. One that cannot be written fails its order, and never the run."""
        orders = self._rank.orders.take_exports()
        wanted = broadcast_bytes(json.dumps(orders[0][0] if orders else None).encode())
        order = json.loads(wanted)
        if order is None:
            return  # whoever asked has gone
        name, adapter_only = order
        path = Path(self._assignment.directory) / EXPORTS / (name or f"step-{self.step}")
        error = self._export(path, adapter_only)
        if error is not None:
            log.error("run %s: an export that was asked for failed: %s", self.run_id, error)
        for _, waiting in orders:
            if error is not None:
                waiting.set_exception(error)
            else:
                waiting.set_result(str(path))

    def _export(self, path: Path, adapter_only: bool) -> PacelineError | None:
        """Why it could not be written, if it could not. Raises what leaves the ranks at different points of their collectives."""
        try:
            tensors = self._gather_export(adapter_only)
        except (Unavailable, FailedElsewhere) as error:
            return error  # raised on every rank, before anything travelled
        except Exception as error:  # a lack of memory on the device, in torch's words
            if self._rank.world_size > 1:
                raise
            return _not_written(path, error)
        try:
            self._write_export(path, tensors, adapter_only)
        except PacelineError as error:
            return error
        except Exception as error:  # transformers, safetensors, the disk and the allocators have their own
            return _not_written(path, error)
        return None

    def _gather_export(self, adapter_only: bool = False) -> dict[str, torch.Tensor]:
        return gather_export(self._trainer.model, self._rank.device, adapter_only=adapter_only)

    def _write_export(self, path: Path, tensors: dict[str, torch.Tensor], adapter_only: bool = False) -> None:
        """On rank 0: the weights as a Hugging Face folder; replaces what this run exported there before."""
        if self._rank.rank == 0:
            if not adapter_only:
                tensors = merged_export(self._trainer.model, tensors)
            scoring = self._spec.has_scoring_head
            export_policy(
                path, tensors, self._spec.policy, scoring=scoring, adapter_only=adapter_only, replace=True
            )

    def _finish(self) -> None:
        """Every step is trained: export, say so, and serve members with the last version until the run ends.

        What cannot be written now may be written later, by another session: all ranks are at one point.
        """
        path = Path(self._assignment.directory) / EXPORT
        try:
            tensors = self._gather_export()
            succeed_on_all_ranks(lambda: self._write_export(path, tensors), self._rank.device)
            self._checkpoints.save_last(self._trainer, self.step, self._chain, self._parts.superseded.wait)
        except FailedElsewhere as error:
            log.error("run %s: %s", self.run_id, error)
            return
        except (Unavailable, OSError, Conflict, SafetensorError) as error:
            text = f"the run is trained, but what it leaves could not be written: {error}"
            self._fail(text, fault=worker_pb2.FAULT_PASSING)
            return
        self._reports.say(finished=True, export_path=str(path))
        self._next_part()

    def _fail(self, message: str, **facts: Any) -> None:
        log.error("run %s: %s", self.run_id, message)
        self._reports.fail(error=message, step=self.step, **facts)

    def _end_at_step(self, error: Exception) -> None:
        """The session ends here, and the process with it: the device's memory and the other ranks' collectives are in nobody
        knows which state. The coordinator counts it against the step and gives the next process a new session.
        """
        log.error("run %s: step %d cannot be trained", self.run_id, self.step, exc_info=error)
        fault = describe(error, self._spec, self._rank.device, self._longest)
        self._fail(f"{fault.message} (rank {self._rank.rank})", fault=fault.kind)
        self.out_of_step = True
        self._rank.leave(fault.message)

    @property
    def _vocabulary(self) -> int:
        """Rows of the model's embedding: token ids are below this."""
        embedding = cast(torch.nn.Embedding, self._trainer.model.get_input_embeddings())
        return int(embedding.weight.shape[0])


def _not_written(path: Path, error: Exception) -> PacelineError:
    return Unavailable(f"{path} could not be written: {type(error).__name__}: {error}")

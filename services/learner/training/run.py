"""The learner's work on one run, on each rank: next batch, train, publish, receipt, checkpoint. All ranks go through
the same collectives in the same order: they agree before every step (`StepAgreement`), then come the step's own
collectives, then gathering for publishing, checkpoint or export. Publishing to members happens in other threads and
processes, from a staged copy, while the next step trains. No step waits for a rollout worker."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from safetensors import SafetensorError

from paceline.data.tokens import check_vocabulary, load_tokenizer
from paceline.encryption.encrypted_file import WrongKey
from paceline.encryption.storage_key import FILE_VARIABLE, KEY_VARIABLE, storage_key
from paceline.errors import CheckpointFault, Conflict, InvalidInput, NonFiniteLoss, Unavailable, counted
from paceline.learner.batch.samples import TrainingSample, sequences_from_groups
from paceline.learner.checkpoints.checkpoint import Misfit
from paceline.learner.collectives import FailedElsewhere, any_over_ranks, broadcast_bytes, succeed_on_all_ranks
from paceline.learner.model.mesh import mesh_of
from paceline.learner.objectives.examples import ExampleSource, check_rows
from paceline.learner.step.sampler_check import Difference, SamplerCheck
from paceline.learner.step.trainer import Trainer
from paceline.models.export_origin import Origin
from paceline.services.common.gpus import refuse_cpu
from paceline.services.common.reporting.progress_log import ProgressLog
from paceline.services.common.worker.assigned_run import BundledSpec, failed_set_up, spec_of
from paceline.services.learner.context import RankContext
from paceline.services.learner.rank_group import (
    COLLECTIVE_TIMEOUT_S,
    LOADING_TIMEOUT_S,
    long_collectives,
    meeting_host,
    set_collective_timeout,
)
from paceline.services.learner.training.batches import BatchClient, RankBatch, StepAgreement
from paceline.services.learner.training.checkpoints import NotShared, SessionCheckpoints
from paceline.services.learner.training.exports import RunExports
from paceline.services.learner.training.publishing import Publishing
from paceline.services.learner.training.run_reports import (
    RunReports,
    collective_time,
    completion_metrics,
    describe,
    observed,
    pace,
    report_of,
)
from paceline.spec import RunSpec
from paceline.tracing import span, step_traceparent
from paceline.v1 import worker_pb2
from paceline.weights.hosts.transport import check_plain, check_store

ORDER_STORE_S = 30.0
"""Seconds that an ordered checkpoint, and training with it, may wait for the object store."""
log = logging.getLogger(__name__)


class LearnerRun:
    """One session on one run, on one rank. Raises Unavailable for a spec that this version does not understand."""

    def __init__(self, assignment: worker_pb2.RunAssignment, rank: RankContext):
        self.run_id = assignment.run_id
        self.session = assignment.session
        self.step = assignment.start_step
        self.ready = False
        self.diverged = False
        """True if this rank failed but others may not have, so that their collectives would never meet again."""
        self._assignment = assignment
        self._rank = rank
        self.spec: RunSpec = spec_of(assignment)
        self._phase = "loading"
        self._chain = assignment.chain
        self._reports = RunReports(assignment.run_id, assignment.session, rank.report, is_first=rank.place.rank == 0)
        self._exports = RunExports(assignment.run_id, assignment.directory, self.spec, rank)
        self._batches = BatchClient(assignment.run_id, assignment.session, rank)
        self._checkpoints = SessionCheckpoints(
            assignment, self.spec.checkpointing, self._reports.keep, self._reports.warn
        )
        self.publishing = Publishing(assignment, self.spec, rank, self._reports.warn)
        """Publishes the run's weights to the members, and takes the control plane's messages about the weights."""
        self._progress = ProgressLog(log)
        self._examples: ExampleSource | None = None
        self._held_out: ExampleSource | None = None
        self._is_complete = False
        """True if the run ended before its last step: the coordinator has no further batch."""
        self._sampler_check: SamplerCheck | None = None
        self._longest = 0
        """Tokens of the longest sequence in this rank's part of the last batch."""

    @property
    def receipted(self) -> int:
        """Number of steps up to which the coordinator has this rank's receipts; 0 before the session's first receipt."""
        return self._batches.receipted

    @property
    def gauges(self) -> dict[str, float]:
        return self._checkpoints.gauges

    @property
    def phase(self) -> str:
        """Current work of the main thread: `loading`, `waiting` for a batch, `training`, `publishing` or `saving`."""
        return "saving" if self._checkpoints.saving else self._phase

    def train(self) -> None:
        """Train from the assignment to the end of the run, or of this session. Faults are reported, not raised."""
        if not self._try_set_up():
            return
        self.ready = True
        self._reports.report(vocab_size=self._vocabulary)
        self.publishing.publish(self.step, last=False)
        try:
            while self.step < self.spec.max_num_steps:
                batch = self._next_batch()
                if batch is None:
                    return
                if batch.is_last:
                    self._end_early()
                    break
                self._train_step(batch)
                set_collective_timeout(COLLECTIVE_TIMEOUT_S)  # models are loaded, kernels are compiled
            self._finish()
        except NonFiniteLoss as error:  # raised on every rank, so they are still at one point
            self._fail(
                f"step {self.step} was stopped before the optimizer: {error}. `paceline resume {self.run_id}` continues from "
                "the newest checkpoint; policy.skip_non_finite_updates skips such updates",
                resumable=True,
            )
        except Unavailable as error:
            self._fail(str(error), fault=worker_pb2.FAULT_PASSING)
            self.diverged = self._rank.place.world_size > 1
        except Exception as error:
            self._end_at_step(error)

    def close(self) -> None:
        """End publishing, and refuse orders that came too late."""
        self._rank.orders.refuse_all(f"run {self.run_id} has ended")
        self._checkpoints.close()
        self.publishing.close()

    def supersede(self) -> None:
        """End this session after the current step, because the learner has another run, or none."""
        self._batches.superseded.set()

    def keep_checkpoints(self, order: worker_pb2.KeepCheckpoints) -> None:
        """Delete the checkpoints that the ledger no longer has."""
        if order.run_id == self.run_id:
            self._checkpoints.keep_only(list(order.paths))

    def report_again(self) -> None:
        """Repeat reports that may have been lost with the stream while the coordinator was unreachable."""
        self._reports.repeat()
        self.publishing.interrupt("the coordinator was unreachable")

    def _try_set_up(self) -> bool:
        try:
            self._set_up()
        except FailedElsewhere as error:
            log.error("run %s: %s", self.run_id, error)  # the rank that failed reports why
        except CheckpointFault as error:
            self._fail(str(error), fault=worker_pb2.FAULT_CHECKPOINT, checkpoint_path=error.path)
        except (Misfit, NotShared, WrongKey) as error:
            self._fail(str(error), resumable=True)
        except Exception as error:  # raised on every rank, so they are at one point and may try again
            self._rank.report(failed_set_up(self.run_id, error, self.session))
        else:
            return True
        return False

    def _set_up(self) -> None:
        """Read everything that the spec names. A collective call: all ranks agree first, because a rank that cannot
        read would leave the other ranks waiting in their next collective. Later errors are raised on every rank."""
        spec = self.spec
        set_collective_timeout(LOADING_TIMEOUT_S)
        succeed_on_all_ranks(self._check_surroundings, self._rank.place.device)
        self._checkpoints.check_folder(self._rank.place.device, self._rank.stopping.wait)
        if self._rank.place.world_size > 1:
            for policy in (spec.policy, spec.frozen_policy, spec.value_policy):
                if policy is not None:
                    # The ranks make its groups together, before one of them may fail.
                    mesh_of(policy, self._rank.place.device)
        succeed_on_all_ranks(self._read, self._rank.place.device)
        self._checkpoints.load(self._trainer, self._rank.stopping.wait)
        if spec.examples is not None:
            for source in (each for each in (self._examples, self._held_out) if each is not None):
                if self._assignment.start_step == 0:  # later sessions train the rows that the first one has checked
                    check_rows(source, self._rank.place.device, self._rank.place.rank)
                self._trainer.reference.prepare(source, self._rank.place.rank)
        else:
            self.publishing.open(self._trainer.model)
            if spec.compares_samplers:
                self._sampler_check = SamplerCheck(self._trainer, self.session)

    def _check_surroundings(self) -> None:
        """Raise WrongKey without the coordinator's storage key, InvalidInput if data would leave this host unencrypted."""
        check_key(self._assignment)
        weights, checkpoints = self.spec.weights, self.spec.checkpointing
        allowed = weights.allow_plaintext_network
        meeting, remedy = "a learner whose hosts meet", "start all ranks on one host"
        check_plain(meeting, [meeting_host()], allowed=allowed, remedy=remedy)
        for url in (weights.store, checkpoints.checkpoint_dir, self._assignment.directory):
            check_store(url or "", os.environ, allowed=allowed)

    def _read(self) -> None:
        spec = self.spec
        if self._rank.place.device.type == "cpu" and not self._rank.place.cpu_chosen:
            refuse_cpu(spec.cluster, "learner")
        self._exports.remove_left_overs()
        torch.manual_seed(spec.seed)
        self._trainer = Trainer(spec, self._rank.place.device)
        tokenizer = load_tokenizer(spec.policy)
        check_vocabulary(tokenizer, self._vocabulary, f"policy.model_name {spec.policy.model_name!r}")
        if spec.examples is not None:
            objective = self._trainer.objective
            address, bundle = self._rank.membership.coordinator, self._assignment.bundle
            with contextlib.closing(BundledSpec(spec, address, bundle, "data")) as bundled, bundled.original_paths():
                self._examples = ExampleSource(bundled.spec, tokenizer, objective)
                if spec.examples.validates:
                    self._held_out = ExampleSource(bundled.spec, tokenizer, objective, validation=True)

    def _next_batch(self) -> RankBatch | None:
        """Return this rank's part of the next batch, once every rank has its part; None if the run has ended. If the
        run is complete before its last step, the batch has no groups (`RankBatch.is_last`), on every rank."""
        self._phase = "waiting"
        batch: RankBatch | None = None
        while True:
            if batch is None:
                with span("wait", step_traceparent(self.run_id, self.step), step=self.step):
                    batch = self._batches.fetch(self.step + self._is_complete)
            agreed = self._facts(batch).on_any_rank(self._rank.place.device)
            with long_collectives():
                self._work_between_steps(agreed)
            if agreed.run_ended or agreed.stopping:
                return None
            if agreed.run_complete:
                return RankBatch.end_of_run()
            if agreed.batch_missing or batch is None:
                continue
            if self._is_one_batch(batch):
                return batch
            batch = None

    def _facts(self, batch: RankBatch | None) -> StepAgreement:
        orders = self._rank.orders
        return StepAgreement(
            batch_missing=batch is None,
            run_ended=batch is not None and batch.is_end,
            run_complete=batch is not None and batch.is_last,
            stopping=self._rank.stopping.is_set(),
            checkpoint_ordered=bool(orders.checkpoint),
            export_ordered=bool(orders.export),
            checkpoint_unwritten=self._checkpoints.unwritten,
            snapshot_wanted=self.publishing.wants_snapshot,
        )

    def _work_between_steps(self, agreed: StepAgreement) -> None:
        if agreed.snapshot_wanted:
            self.publishing.write_snapshot()
        if not agreed.checkpoint_unwritten:
            self._checkpoints.finish()
        if agreed.checkpoint_ordered:
            self._save_ordered()
        if agreed.export_ordered:
            self._exports.carry_out_orders(self._trainer.model, self._origin())
        if agreed.stopping and not agreed.run_ended:
            self._rank.stop()
            self._begin_save(unchanged=True)
            self._checkpoints.finish()
            self._checkpoints.until_stored(_after(self._rank.grace_s / 2))

    def _is_one_batch(self, batch: RankBatch) -> bool:
        """Return whether all ranks have parts of one batch; the batch may have been fixed again meanwhile."""
        if self._rank.place.world_size == 1:
            return True
        first = broadcast_bytes(batch.reply.chain.encode()).decode()
        (differs,) = any_over_ranks([batch.reply.chain != first], self._rank.place.device)
        return not differs

    def _train_step(self, batch: RankBatch) -> None:
        self._phase, traceparent = "training", batch.reply.traceparent
        with span("train", traceparent, step=self.step, rank=self._rank.place.rank):
            if self._examples is not None:
                samples = self._examples.of_step(self.step, self._rank.place.rank, self._rank.place.world_size)
            else:
                samples = sequences_from_groups(batch.groups, self.spec)
            self._longest = max((len(s.prompt_ids) + len(s.completion_ids) for s in samples), default=0)
            before = self._validate() if self.step == 0 else {}
            statistics = observed(self.spec, self._rank.place.rank, batch.groups)
            self._trainer.token_statistics = statistics
            started_s = time.perf_counter()
            compared = self._compare_samplers(batch, samples)
            check_s = time.perf_counter() - started_s
            with collective_time(self._is_profiled(), self._rank.place.device) as in_collectives:
                metrics = self._trainer.train_step(samples, self.step)
            self._trainer.token_statistics = None
            metrics |= in_collectives | ({} if self._sampler_check is None else {"spot_check_s": check_s})
            if self.spec.samples:
                metrics |= completion_metrics(batch.groups, self._rank.place.device)
        for skipped in self._trainer.skipped:
            self._reports.warn(f"step {self.step}: an update was skipped, {skipped}")
        metrics |= pace(metrics, self._rank.place.world_size, self._rank.place.device)
        self._chain = batch.reply.chain
        self._phase = "publishing"
        self.step += 1
        metrics |= {f"validation_before/{name}": value for name, value in before.items()}
        metrics |= {f"validation/{name}": value for name, value in self._validate().items()}
        last = self.step == self.spec.max_num_steps
        if last or self.step % self.spec.weights.publish_interval == 0:
            started_s = time.perf_counter()
            with span("publish", traceparent, step=self.step):
                self.publishing.publish(self.step, last=last)
            metrics["publish_wait_s"] = time.perf_counter() - started_s
        # All sampled tokens of groups, also those that overlong filtering removes, as the token accounting has them.
        trained = sum(len(sample.completion_ids) for sample in samples)
        tokens = batch.num_tokens if self.spec.samples else trained
        self._batches.send_receipt(batch, self.step - 1, tokens, metrics, compared)
        if statistics is not None:
            self._rank.report(report_of(statistics.of(samples), self.run_id, self.session, self.step - 1))
        self._log_progress(metrics)
        if self.spec.checkpointing.enabled and (last or self.step % self.spec.checkpointing.save_period == 0):
            self._begin_save(unchanged=last)

    def _compare_samplers(self, batch: RankBatch, samples: list[TrainingSample]) -> list[Difference]:
        """Compare the groups that the coordinator has marked, and keep the weights before the step changes them."""
        if self._sampler_check is None:
            return []
        chosen = {sent.group_id for sent in batch.reply.groups if sent.verify}
        compared = self._sampler_check.compare(batch.groups, samples, chosen, self.step)
        if self.step == self._assignment.start_step or self.step % self.spec.weights.publish_interval == 0:
            self._sampler_check.keep(self.step)
        return compared

    def _is_profiled(self) -> bool:
        period = self.spec.logger.profile_period
        return self._rank.place.rank == 0 and period > 0 and self.step % period == period - 1

    def _log_progress(self, metrics: dict[str, float]) -> None:
        if self._rank.place.rank != 0:
            return
        loss, step, total = metrics.get("loss", math.nan), self.step, self.spec.max_num_steps
        self._progress.note(
            lambda sums, s: (
                f"run {self.run_id}: {step} of {counted(total, 'step')}, {sums['steps']:.0f} of them in the last {s:.0f} s with "
                f"{sums['tokens']:,.0f} tokens, loss {loss:.4g}"
            ),
            steps=1,
            tokens=metrics["tokens"],
        )

    def _validate(self) -> dict[str, float]:
        """Return the objective on the held-out examples, if the spec asks for it after the current step."""
        rank, examples = self._rank, self.spec.examples
        if self._held_out is None or examples is None or not examples.val_due(self.step):
            return {}
        return self._trainer.evaluate(self._held_out.held_out(rank.place.rank, rank.place.world_size))

    def _end_early(self) -> None:
        if self.step > self._assignment.start_step and self.step % self.spec.weights.publish_interval:
            self.publishing.publish(self.step, last=True)
        if self.spec.checkpointing.enabled:
            self._begin_save(unchanged=True)
        self._is_complete = True

    def _begin_save(self, *, unchanged: bool) -> None:
        self._checkpoints.name_audit_head(self._batches.audit_head.sequence, self._batches.audit_head.hash)
        with long_collectives():  # the checkpoint before may still be uploading
            self._checkpoints.begin(self._trainer, self.step, self._chain, unchanged=unchanged)

    def _save_ordered(self) -> None:
        self._begin_save(unchanged=True)
        failure = self._checkpoints.finish()
        if not self._checkpoints.until_stored(_after(ORDER_STORE_S)):
            failure = (
                failure
                or "the checkpoint is written, but waits on the learner's disk until the store can be written again"
            )
        for order in self._rank.orders.take_checkpoints():
            if failure:
                order.set_exception(Unavailable(failure))
            else:
                order.set_result(self._checkpoints.newest)

    def _finish(self) -> None:
        """Export the trained model, report the end, and serve members until the run ends. Files that cannot be written
        now may be written later, by another session, because all ranks are at one point."""
        try:
            with long_collectives():
                if self._checkpoints.is_queued:  # waits for the store, which the export needs as well
                    self._save_last()
                path = self._exports.write_final(self._trainer.model, self._origin())
                if not self._checkpoints.is_queued:
                    self._save_last()
        except FailedElsewhere as error:
            log.error("run %s: %s", self.run_id, error)
            return
        except (Unavailable, OSError, Conflict, SafetensorError) as error:
            text = f"the run is trained, but its results could not be written: {error}"
            self._fail(text, fault=worker_pb2.FAULT_PASSING)
            return
        self._reports.report(finished=True, export_path=str(path))
        # Serve members and carry out orders until the run or this session ends; there is no further batch. A run that
        # ended early waits for the step after its end, because it has the answer for that step already.
        self._next_batch()

    def _origin(self) -> Origin:
        return Origin(
            run_id=self.run_id,
            session=self.session,
            step=self.step,
            chain=self._chain,
            spec_sha256=hashlib.sha256(self._assignment.spec_yaml.encode()).hexdigest(),
        )

    def _save_last(self) -> None:
        """Finish the last checkpoint; wait for its object store until this session ends. Raises Unavailable."""
        self._checkpoints.save_last(self._trainer, self.step, self._chain, self._batches.superseded.wait)
        if not self._checkpoints.until_stored(
            lambda: self._batches.superseded.is_set() or self._rank.stopping.is_set()
        ):
            raise Unavailable("the store of the run's checkpoints does not answer")

    def _fail(self, message: str, **facts: Any) -> None:
        log.error("run %s: %s", self.run_id, message)
        self._reports.fail(error=message, step=self.step, **facts)

    def _end_at_step(self, error: Exception) -> None:
        """End the session and the process, because the state of the device's memory and of the other ranks' collectives
        is unknown. The coordinator counts the failure against the step and begins a new session."""
        log.error("run %s: step %d cannot be trained", self.run_id, self.step, exc_info=error)
        kind, message = describe(error, self.spec, self._rank.place.device, self._longest)
        self._fail(f"{message} (rank {self._rank.place.rank})", fault=kind)
        self.diverged = True
        self._rank.leave(message)

    @property
    def _vocabulary(self) -> int:
        """Number of rows of the model's embedding; every token id is below this number."""
        embedding = cast(torch.nn.Embedding, self._trainer.model.get_input_embeddings())
        return int(embedding.weight.shape[0])


def _after(seconds: float) -> Callable[[], bool]:
    end_s = time.monotonic() + seconds
    return lambda: time.monotonic() > end_s


def check_key(assignment: worker_pb2.RunAssignment) -> None:
    """Raise WrongKey unless this process has the key that the coordinator names, or both have none."""
    try:
        key = storage_key()
    except InvalidInput as error:
        raise WrongKey(f"the learner: {error}, then `paceline resume {assignment.run_id}`") from None
    name = "" if key is None else key.name.hex()
    if name == assignment.storage_key:
        return
    raise WrongKey(
        f"the learner has {_named(name)}, but the coordinator has {_named(assignment.storage_key)}; start both with the same "
        f"{FILE_VARIABLE} or {KEY_VARIABLE}, then `paceline resume {assignment.run_id}`"
    )


def _named(name: str) -> str:
    return f"the storage key {name}" if name else "no storage key"

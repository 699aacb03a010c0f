"""The checkpoints of one session: begun after a step, written during the next steps, then reported to the coordinator.

A checkpoint that cannot be written causes a warning, and the run continues without it; only the last one is retried.
All ranks call `load`, `begin`, `finish` and `save_last` at the same point. A separate thread deletes old checkpoints.
Reading the checkpoint that the session begins from is retried (a mount may be late). After the last attempt, and at
once if the checkpoint is damaged, the session gives up, and the coordinator gives the next session an older checkpoint.

Checkpoints for an object store are written to this machine's spool and uploaded from there; training continues even if
the store does not answer (`learner/checkpoints/upload_queue.py`). They are reported once they are whole in the store.
All ranks queue and drop the same checkpoints, and each rank has a part of the spool's quota.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.errors import CheckpointFault, Conflict, NotFound, PacelineError, Unavailable
from paceline.files.bounded_cache import SIZE_VARIABLE, quota_bytes
from paceline.files.storage import Folder, checkpoint_folder
from paceline.learner.checkpoints import checkpoint as checkpoints
from paceline.learner.checkpoints.checkpoint import Checkpoint, Misfit
from paceline.learner.checkpoints.upload_queue import FIRST_PAUSE_S, LONGEST_PAUSE_S, UploadQueue
from paceline.learner.checkpoints.writer import CheckpointWriter
from paceline.learner.collectives import any_over_ranks, broadcast_bytes, max_over_ranks, union_over_ranks, world_size
from paceline.learner.step.trainer import Trainer
from paceline.learner.weights.gather import is_first_rank
from paceline.spec import CheckpointingSection
from paceline.v1 import worker_pb2

LAST_SAVE_PAUSES_S = (2.0, 5.0, 10.0, 20.0, 60.0, 0.0)
"""Seconds before each further attempt at the last checkpoint."""
LOAD_PAUSES_S = (1.0, 2.0, 4.0)
"""Seconds before each further attempt at a checkpoint that is missing or cannot be read."""
SEEN_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 3.0)
"""Seconds before each further check for a file of rank 0, because a network file system may show it late."""
log = logging.getLogger(__name__)


class NotShared(PacelineError):
    """The ranks of the learner do not share one folder of checkpoints."""


class SessionCheckpoints:
    """One rank's part of a session's checkpoints. `report` gets complete checkpoints, `warn` warnings about failures."""

    def __init__(
        self,
        assignment: worker_pb2.RunAssignment,
        settings: CheckpointingSection,
        report: Callable[[worker_pb2.ConnectRequest], None],
        warn: Callable[[str], None],
        upload_pauses_s: tuple[float, float] = (FIRST_PAUSE_S, LONGEST_PAUSE_S),
    ):
        self.newest = (assignment.checkpoint_path, assignment.start_step)
        """Path and step of the newest complete checkpoint; current only on rank 0."""
        self.saving = False
        """True while training waits for a checkpoint."""
        self._assignment, self._report, self._warn = assignment, report, warn
        self._directory = checkpoint_folder(settings, assignment.directory, assignment.run_id)
        self._enabled = settings.enabled
        self._ahead: set[str] = set()
        self._uploads: CheckpointUploads | None = None
        if self._directory.local is None:
            self._uploads = CheckpointUploads(self._directory, self._register, warn, upload_pauses_s)
        folder = self._directory if self._uploads is None else self._uploads.folder
        self._writer = CheckpointWriter(folder, assignment.session, shared=self._uploads is None)
        self._seconds: dict[int, float] = {}
        """Maps the step of each checkpoint that is not reported yet to the seconds that writing it took."""
        self._deleting = ThreadPoolExecutor(1, "delete checkpoints")

    def check_folder(self, device: torch.device, pause: Callable[[float], object]) -> None:
        """Check the folder on all ranks before loading. Raises the same error on all ranks: CheckpointFault if a
        checkpoint of this or a later session exists; NotShared if a rank does not see the files of rank 0."""
        if self._uploads is not None:
            self._uploads.device = device
        taken = broadcast_bytes(self._taken().encode()).decode()
        if taken:
            number = self._assignment.session
            raise CheckpointFault(
                f"session {number} cannot begin: {taken} is a checkpoint of the same or of a later session", taken
            )
        if world_size() > 1 and self._enabled:
            self._check_shared(device, pause)

    def _taken(self) -> str:
        """Return a checkpoint of this or a later session; empty if there is none. Remember the checkpoints of steps
        after this session's first step, because this session must not delete them."""
        if not is_first_rank():
            return ""
        session, start = self._assignment.session, self._assignment.start_step
        try:
            positions = checkpoints.list_positions(self._directory)
        except Exception as error:  # of the object store's client; writing will fail too and report it
            log.warning("the folder of checkpoints %s could not be listed: %s", self._directory, error)
            return ""
        self._ahead = {str(folder) for (_, step), folder in positions if step > start}
        taken = [folder for (number, _), folder in positions if number >= session]
        return str(taken[-1]) if taken else ""

    def _check_shared(self, device: torch.device, pause: Callable[[float], object]) -> None:
        name = broadcast_bytes(self._write_sign().encode()).decode()
        if not name:
            return  # nothing can be written now; the first checkpoint reports it
        seen = self._sees(name)
        for pause_s in SEEN_PAUSES_S:
            if not any_over_ranks([not seen], device)[0]:
                break
            pause(pause_s)
            seen = self._sees(name)
        missing = union_over_ranks([] if seen else [dist.get_rank()], device)
        if is_first_rank():
            with contextlib.suppress(Exception):  # of the object store's client: an empty file may stay
                self._directory.delete(name)
        if (
            missing and 0 not in missing
        ):  # if rank 0 sees nothing either, the store does not answer; the first checkpoint reports it
            raise NotShared(
                f"checkpoint_dir must be seen by all ranks: rank {', '.join(map(str, missing))} of the learner does not see "
                f"what rank 0 writes to {self._directory}. Start the coordinator with --store and a URL or a folder that all "
                "hosts of the learner share, or set checkpointing.checkpoint_dir to a place that they share"
            )

    def _sees(self, name: str) -> bool:
        """Return whether a file exists; False if the store fails, because all ranks have to reach the same collective."""
        try:
            return self._directory.exists(name)
        except Exception as error:  # of the object store's client
            log.warning("%s could not be read: %s", self._directory, error)
            return False

    def _write_sign(self) -> str:
        """Write a new file that the other ranks check for, and return its name; empty if it could not be written."""
        if not is_first_rank():
            return ""
        name = f".seen-by-all-ranks-{uuid.uuid4().hex}"
        try:
            self._directory.make()
            self._directory.write(name, b"")
        except Exception as error:  # of the object store's client
            log.warning("nothing could be written to %s: %s", self._directory, error)
            return ""
        return name

    @property
    def unwritten(self) -> bool:
        """Return whether `finish` would wait on this rank."""
        return self._writer.in_progress and not self._writer.ready

    def load(self, trainer: Trainer, pause: Callable[[float], object]) -> None:
        """Load the checkpoint that the session begins from. Raises the same error on all ranks: CheckpointFault if it
        is missing, damaged or unreadable, Misfit for another model, WrongKey for another storage key, Unavailable if
        its store does not answer."""
        if not self._assignment.checkpoint_path:
            return
        for pause_s in LOAD_PAUSES_S:
            try:
                return self._load(trainer)
            except (NotFound, Unavailable) as error:
                log.warning("%s; retrying in %.0f s", error, pause_s)
                pause(pause_s)
        try:
            self._load(trainer)
        except (NotFound, Unavailable) as error:
            if isinstance(error, Unavailable) and Folder(self._assignment.checkpoint_path).local is None:
                raise  # older checkpoints are in the same store, so the run waits for it
            raise CheckpointFault(str(error), self._assignment.checkpoint_path) from error

    def _load(self, trainer: Trainer) -> None:
        try:
            checkpoints.load(
                self._assignment.checkpoint_path,
                expected_sha256=self._assignment.checkpoint_sha256,
                model=trainer.model,
                optimizer=trainer.optimizer,
                critic=trainer.critic,
                reference=trainer.synced_reference,
            )
        except Misfit:
            raise
        except Conflict as error:
            raise CheckpointFault(str(error), self._assignment.checkpoint_path) from error
        log.info("session %d continues from step %d", self._assignment.session, self._assignment.start_step)

    def begin(self, trainer: Trainer, step: int, chain: str, *, unchanged: bool = False) -> None:
        """Copy the state after `step` steps and start to write it; `chain` is the end of the chain of their batches.
        `unchanged` promises that the state does not change before `finish`, so that no copy is made."""
        if step == (self._assignment.start_step if self._assignment.checkpoint_path else -1):
            return  # the session began from this checkpoint
        if step == self._writer.step:
            return
        self.finish()
        self.saving = True
        model, optimizer, reference = trainer.model, trainer.optimizer, trainer.synced_reference
        self._writer.begin(step, model, optimizer, chain, trainer.critic, reference, unchanged=unchanged)
        self.saving = False

    def name_audit_head(self, sequence: int, record_hash: str) -> None:
        """Name the audit log's newest record in later manifests, so that nobody can cut off the log's end unnoticed."""
        if sequence:
            self._writer.extra = {"audit": {"sequence": sequence, "hash": record_hash}}

    def finish(self) -> str:
        """Wait for the checkpoint in progress, if there is one, and report it. If it could not be written, return the
        reason on each rank that knows the reason, and an empty text on the other ranks; the run continues."""
        if not self._writer.in_progress:
            return ""
        self.saving, failure, saved = True, "", None
        try:
            saved = self._writer.finish()
        except (Unavailable, OSError) as error:
            failure = str(error)
            self._warn(f"no checkpoint of step {self._writer.step}: {failure}; the run goes on without it")
        finally:
            self.saving = False
        self._seconds[self._writer.step] = self._writer.seconds
        if self._uploads is not None:
            self._uploads.add(f"{self._assignment.session}-{self._writer.step}", saved, failure)
        elif saved is not None:
            self._register(saved)
        return failure

    def _register(self, saved: Checkpoint) -> None:
        """Report a checkpoint that is complete at its destination; called on the uploading thread for an object store."""
        self.newest = (str(saved.path), saved.manifest.step)
        self._report(
            worker_pb2.ConnectRequest(
                checkpoint=worker_pb2.CheckpointReport(
                    run_id=self._assignment.run_id,
                    session=self._assignment.session,
                    step=saved.manifest.step,
                    path=str(saved.path),
                    sha256=saved.manifest_sha256,
                    chain=saved.manifest.chain_hash,
                    seconds=self._seconds.pop(saved.manifest.step, 0.0),
                )
            )
        )

    @property
    def is_queued(self) -> bool:
        """Return whether checkpoints are queued for an object store."""
        return self._uploads is not None

    @property
    def gauges(self) -> dict[str, float]:
        """State of the queue for an object store, for the heartbeat; empty without an object store."""
        return {} if self._uploads is None else self._uploads.gauges

    def until_stored(self, ended: Callable[[], bool]) -> bool:
        """Wait until all finished checkpoints are at their destination; False if `ended` comes first, on any rank."""
        return self._uploads is None or self._uploads.until_stored(ended)

    def save_last(self, trainer: Trainer, step: int, chain: str, pause: Callable[[float], object]) -> None:
        """Finish the last checkpoint, with retries, because the disk may be full. Raises Unavailable after the last
        attempt."""
        for pause_s in LAST_SAVE_PAUSES_S:
            if not any_over_ranks([bool(self.finish())], trainer.device)[0]:
                return
            if pause_s:
                pause(pause_s)
                self._writer.step = -1
                self.begin(trainer, step, chain, unchanged=True)
        raise Unavailable(f"the checkpoint of step {step}, the last one, could not be written; see the log")

    def keep_only(self, paths: list[str]) -> None:
        """Delete, while training continues, all older checkpoints except `paths`: the ledger no longer has those older
        ones."""
        with contextlib.suppress(RuntimeError):  # the run ends at this very moment
            self._deleting.submit(self._delete_all_but, paths)

    def close(self) -> None:
        with contextlib.suppress(PacelineError):
            self._writer.finish()  # nobody needs it any more, but its thread must not run into the next run
        if self._uploads is not None:
            self._uploads.close()
        self._deleting.shutdown()

    def _delete_all_but(self, kept: list[str]) -> None:
        try:
            checkpoints.prune(self._directory, kept, spared=self._ahead)
        except Exception as error:  # of the object store's client
            log.warning("old checkpoints could not be deleted: %s; the next checkpoint retries the deletion", error)


STORE_POLL_S = 0.5
"""Seconds between two checks of all ranks whether the queue for the object store is empty."""


class CheckpointUploads:
    """One rank's checkpoints that wait for an object store. All ranks call `add` and `until_stored` at the same point.
    `on_stored` gets each checkpoint that is whole in the store, on rank 0 and on another thread."""

    def __init__(
        self,
        store: Folder,
        on_stored: Callable[[Checkpoint], None],
        warn: Callable[[str], None],
        pauses_s: tuple[float, float],
    ):
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._queue = UploadQueue(store, rank, on_stored, warn, pauses_s)
        self._store, self._warn = store, warn
        self.device = torch.device("cpu")

    @property
    def folder(self) -> Path:
        """Folder of this rank for the files of new checkpoints."""
        return self._queue.spool

    @property
    def gauges(self) -> dict[str, float]:
        """State of the queue: bytes on every rank, the other values only on rank 0."""
        queue = self._queue
        first = {"queued_checkpoints": float(len(queue.names)), "store_away_s": queue.away_s}
        return {"spool_bytes": float(queue.size_bytes)} | (first if is_first_rank() else {})

    def add(self, name: str, saved: Checkpoint | None, failure: str) -> None:
        """Queue this rank's part of the checkpoint that was written last, unless there was a `failure`. All ranks drop
        the same checkpoints if any rank exceeds its part of the quota; the newest checkpoint stays."""
        queue = self._queue
        if not failure:
            queue.add(Folder(queue.spool) / name, saved)
        rank0_names: list[str] = json.loads(broadcast_bytes(json.dumps(queue.names).encode()))
        # Rank 0 could not write them, or has stored them.
        queue.drop([name for name in queue.names if name not in rank0_names])
        share = quota_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE") or world_size())
        fitting = torch.tensor([-queue.fitting(share) if queue.names else -len(rank0_names)], device=self.device)
        surplus = rank0_names[: max(0, len(rank0_names) + int(max_over_ranks(fitting).item()))]
        queue.drop(surplus)
        if surplus and is_first_rank():
            self._warn(
                f"checkpoints {', '.join(surplus)} were dropped before they reached {self._store}: the waiting checkpoints need more "
                f"than the {share >> 20} MB that a rank has in the spool ({SIZE_VARIABLE}); newer checkpoints stay queued, and the run goes on"
            )

    def until_stored(self, ended: Callable[[], bool]) -> bool:
        """Wait until all checkpoints are in the store; False if `ended` comes first, on any rank."""
        while True:
            waits, gives_up = any_over_ranks([not self._queue.wait_stored(STORE_POLL_S), ended()], self.device)
            if not waits or gives_up:
                return not waits

    def close(self) -> None:
        """End the thread. Checkpoints that still wait are dropped."""
        self._queue.close()

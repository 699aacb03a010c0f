"""Checkpoints written while training goes on: the state is copied to host memory, then a thread writes the copy.

If nothing changes the state until the checkpoint is written (the last one, and those that the training waits for), the
live tensors are written. The live tensors are also written if the host has no memory for a copy; `begin` then returns
after writing.

Invariants: one checkpoint is in progress at a time; the next one waits for it. All ranks call `begin` and `finish` at
the same point. `begin` returns when the copy is made, so the written state is that after the step, whatever is trained
meanwhile. The writing threads of the ranks agree over a separate process group, because the default one belongs to the
training step. The manifest is written last, on rank 0: a process that dies earlier leaves a torn folder.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from paceline.files.storage import Folder
from paceline.host.resources import available_bytes
from paceline.learner.checkpoints import checkpoint as checkpoints
from paceline.learner.checkpoints.checkpoint import Checkpoint
from paceline.learner.checkpoints.verification import Location
from paceline.learner.step.critic import Critic

SPARE_BYTES = 1 << 30
"""Bytes of memory that must stay free on the host beside a state's copy."""
log = logging.getLogger(__name__)


class CheckpointWriter:
    """One rank's writer for one session of a run."""

    def __init__(
        self, directory: Location, session: int, *, shared: bool = True, available: Callable[[], int] = available_bytes
    ):
        """`shared` is true if all ranks see the same `directory`."""
        self._directory, self._shared, self._available = directory, shared, available
        self._session = session
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._written: Checkpoint | None = None
        self._error: BaseException | None = None
        self._started_s = 0.0
        self._pinned: BlockingAsyncStager | None = None
        self.extra: dict[str, Any] = {}
        """Facts, by their names, for the manifests of checkpoints that begin later."""
        self.step = -1
        self.seconds = 0.0
        """Seconds that the newest finished checkpoint took from `begin` to its manifest."""

    def begin(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        chain_hash: str = "",
        critic: Critic | None = None,
        reference: nn.Module | None = None,
        *,
        unchanged: bool = False,
    ) -> None:
        """Copy the state after `step` steps, and start to write it. A collective call, after `finish`. `unchanged`
        promises that the state does not change before `finish`: no copy is made. Raises Conflict if this checkpoint
        exists and is complete."""
        if self._thread is not None:
            raise RuntimeError("a checkpoint is still being written; finish it first")
        self._started_s = time.perf_counter()
        folder = Folder(self._directory) / f"{self._session}-{step}"
        with contextlib.suppress(OSError):
            # Not raised here, because that would separate the ranks; writing fails again, on all of them.
            checkpoints.prepare(self._directory, self._session, step)
        state = checkpoints.whole_state(model, optimizer, critic, reference)
        has_room = unchanged or self._has_copy or size_bytes(state) + SPARE_BYTES <= self._available()
        staged = self._copy(state, model) if has_room and not unchanged else state
        if self._group is None and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")
        self.step = step
        self._written = self._error = None
        facts = {"step": step, "chain_hash": chain_hash, "extra": dict(self.extra)}
        facts["num_threads"] = torch.get_num_threads()
        self._thread = threading.Thread(
            target=self._write, args=(staged, folder), kwargs=facts, name=f"checkpoint {step}"
        )
        self._thread.start()
        if not has_room:
            log.info("no memory for a copy of the state: training waits for the checkpoint of step %d", step)
            self._thread.join()

    @property
    def _has_copy(self) -> bool:
        return self._pinned is not None and self._pinned.state_dict_cache is not None

    def _copy(self, state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
        """Return a copy in host memory. A GPU's state goes to pinned memory, which is fast to copy to but slow to
        allocate. So that memory is kept for the next checkpoint, which begins only after this checkpoint is written."""
        if on_gpu(model):
            self._pinned = self._pinned or BlockingAsyncStager(cache_staged_state_dict=True)
            try:
                return self._pinned.stage(state)
            except RuntimeError as error:  # of the driver, which limits pinned memory
                log.warning("the state of step %d is copied to memory that is not pinned: %s", self.step, error)
                self._pinned.state_dict_cache = None
        return BlockingAsyncStager().stage(state)

    @property
    def in_progress(self) -> bool:
        return self._thread is not None

    @property
    def ready(self) -> bool:
        """Return whether `finish` would return at once on this rank."""
        return self._thread is not None and not self._thread.is_alive()

    def finish(self) -> Checkpoint | None:
        """Wait for the checkpoint in progress, if any; return it on rank 0. Raises Unavailable if it could not be
        written (a full disk); its folder is then torn."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        if self._error is not None:
            raise self._error
        return self._written

    def _write(self, staged: dict[str, Any], folder: Folder, **facts: Any) -> None:
        try:
            self._written = checkpoints.write(
                staged, folder, session=self._session, group=self._group, shared=self._shared, **facts
            )
        except BaseException as error:  # `finish` raises it in the thread that can handle it
            self._error = error
        self.seconds = time.perf_counter() - self._started_s


def on_gpu(model: nn.Module) -> bool:
    return next(model.parameters()).is_cuda


def size_bytes(state: Any) -> int:
    """Return the bytes of all tensors in a state; of a sharded tensor, only this rank's part counts."""
    if isinstance(state, dict):
        return sum(size_bytes(part) for part in state.values())
    if isinstance(state, list | tuple):
        return sum(size_bytes(part) for part in state)
    if isinstance(state, DTensor):
        return int(state.to_local().nbytes)
    return int(state.nbytes) if isinstance(state, torch.Tensor) else 0

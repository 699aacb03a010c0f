"""The checkpoints of a session that wait for an object store: queued and dropped by all ranks alike, and waited for.

All ranks call `add` and `until_stored` at the same point. Each has a part of the spool's quota.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.files.spool import SIZE_VARIABLE, quota_bytes
from paceline.files.storage import Folder
from paceline.learner.checkpoints.checkpoint import Checkpoint
from paceline.learner.checkpoints.upload_queue import UploadQueue
from paceline.learner.collectives import any_over_ranks, broadcast_bytes, max_over_ranks, world_size
from paceline.learner.weights.gather import is_first_rank

STORE_POLL_S = 0.5
"""Seconds between two checks of all ranks for the end of the queue."""


class CheckpointUploads:
    """One rank's side. `on_stored` gets each checkpoint that is whole in the store, on rank 0 and on another thread."""

    def __init__(self, store: Folder, on_stored: Callable[[Checkpoint], None], warn: Callable[[str], None]):
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._queue = UploadQueue(store, rank, on_stored, warn)
        self._store, self._warn = store, warn
        self.device = torch.device("cpu")
        """Device for collectives."""

    @property
    def folder(self) -> Path:
        """Folder of this rank for the files of new checkpoints."""
        return self._queue.spool

    @property
    def gauges(self) -> dict[str, float]:
        """Return the state of the queue: bytes of every rank, the rest of rank 0 alone."""
        queue = self._queue
        first = {"queued_checkpoints": float(len(queue.names)), "store_away_s": queue.away_s}
        return {"spool_bytes": float(queue.size_bytes)} | (first if is_first_rank() else {})

    def add(self, name: str, saved: Checkpoint | None, failure: str) -> None:
        """Queue this rank's part of the checkpoint that was written last, unless there was a `failure`.

        The ranks drop the same checkpoints where any of them has more than its part of the quota; the newest stays.
        """
        queue = self._queue
        if not failure:
            queue.add(Folder(queue.spool) / name, saved)
        known: list[str] = json.loads(broadcast_bytes(json.dumps(queue.names).encode()))
        queue.drop(
            [name for name in queue.names if name not in known]
        )  # rank 0 could not write it, or has stored it
        share = quota_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE") or world_size())
        fitting = torch.tensor([-queue.fitting(share) if queue.names else -len(known)], device=self.device)
        surplus = known[: max(0, len(known) + int(max_over_ranks(fitting).item()))]
        queue.drop(surplus)
        if surplus and is_first_rank():
            self._warn(
                f"checkpoints {', '.join(surplus)} were dropped before they reached {self._store}: those that wait for it are more "
                f"than the {share >> 20} MB that a rank has in the spool ({SIZE_VARIABLE}); newer ones wait on, and the run goes on"
            )

    def until_stored(self, ended: Callable[[], bool]) -> bool:
        """Wait until all checkpoints are in the store; return False where `ended` is true before, on any rank."""
        while True:
            waits, gives_up = any_over_ranks(
                [not self._queue.wait_stored(STORE_POLL_S), ended()], self.device
            )
            if not waits or gives_up:
                return not waits

    def close(self) -> None:
        """End the thread. Checkpoints that still wait are given up."""
        self._queue.close()

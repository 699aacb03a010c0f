"""The choice of checkpoints to keep: the newest, or the newest and the best by a metric.

The ledger deletes its rows first, then the learner deletes the files: if a process dies in between, a restart never
gets a checkpoint that is gone.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.spec import CheckpointingSection


class Candidate(NamedTuple):
    """A complete checkpoint with the metric of its step."""

    path: str
    value: float | None
    """Value of the metric; None if there is none."""
    pending: bool = False
    """True when the evaluation that gives the value is not done yet."""


def choose(candidates: list[Candidate], settings: CheckpointingSection) -> list[str]:
    """Return the paths to keep, of `candidates` from oldest to newest.

    Without a metric: the newest `keep_top_k`. With a metric: the newest, which a restart needs, the `keep_top_k` best
    (the newer of equal ones), and those whose value is still to come.
    """
    if settings.metric_name is None:
        return [candidate.path for candidate in candidates[-settings.keep_top_k :]]
    sign = 1.0 if settings.higher_is_better else -1.0
    valued = [(sign * c.value, age, c.path) for age, c in enumerate(candidates) if c.value is not None]
    best = {path for _, _, path in sorted(valued)[-settings.keep_top_k :]}
    return [c.path for c in candidates if c.path in best or c.pending or c is candidates[-1]]


def mark_surplus_removed(ledger: Ledger, run_id: str, settings: CheckpointingSection) -> None:
    """Mark the checkpoints that are not to be kept as removed. Inside a transaction.

    A checkpoint that could not be loaded is not counted, and stays for as long as it is newer than the oldest that is
    kept.
    """
    kept = ledger.checkpoints.kept(run_id)
    sound = [checkpoint for checkpoint in kept if not checkpoint.damaged]
    candidates = [
        Candidate(checkpoint.path, *_value(ledger, run_id, checkpoint.step, settings)) for checkpoint in sound
    ]
    keep = set(choose(candidates, settings))
    resumable = ledger.checkpoints.newest(
        run_id
    )  # the newest may be ahead of the receipts, and is no help before they arrive
    if resumable is not None:
        keep.add(resumable.path)
    oldest = min((checkpoint.step for checkpoint in sound if checkpoint.path in keep), default=0)
    keep |= {checkpoint.path for checkpoint in kept if checkpoint.damaged and checkpoint.step > oldest}
    ledger.checkpoints.mark_removed(
        run_id, [checkpoint for checkpoint in kept if checkpoint.path not in keep]
    )


def kept_paths(ledger: Ledger, run_id: str) -> list[str]:
    """Return the checkpoints that the ledger counts on, oldest first, and those that could not be loaded, because a
    person may repair them."""
    return [checkpoint.path for checkpoint in ledger.checkpoints.kept(run_id)]


def _value(
    ledger: Ledger, run_id: str, step: int, settings: CheckpointingSection
) -> tuple[float | None, bool]:
    """Return the metric of the weights after `step` steps, and whether it is still to come."""
    if settings.metric_name is None:
        return None, False
    kind, _, name = settings.metric_name.partition(":")
    if kind == "val":
        evaluation = ledger.evaluations.get(run_id, step)
        if evaluation is not None and not evaluation["done"]:
            return None, True
        metrics = None if evaluation is None else json.loads(evaluation["result_json"])
    else:
        metrics = ledger.metrics_of_step(run_id, step - 1)
    value = None if metrics is None else metrics.get(name)
    return (None if value is None else float(value)), False

"""Makes the plan of a replay from the ledger, which is opened read-only: the steps, the checkpoint to start from, the
ranks and their groups. Promise: each rank gets the groups that it trained, by the function with which the exchange
served the groups."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.errors import Conflict, NotFound
from paceline.files.storage import Folder
from paceline.groups import Group
from paceline.learner.checkpoints.manifest import read_manifest
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.ledger.segments import read_frame
from paceline.services.coordinator.ledger.tables.batches import split_batch
from paceline.services.coordinator.ledger.tables.checkpoints import Checkpoint
from paceline.spec import RunSpec
from paceline.spec.reading import spec_of_run
from paceline.wire import decode_group


@dataclass(frozen=True)
class ReplayPlan:
    """Recorded steps [start, end) of a run."""

    run_id: str
    spec: RunSpec
    start: int
    end: int
    ranks: int
    """World size that trained step `start`."""
    steady: bool
    """True if all steps were trained at one world size; otherwise a replay is not bit-identical."""
    threads: int
    """Compute threads of each rank."""
    checkpoint: Checkpoint | None
    """Checkpoint to start from. None at step 0, where the run's model is loaded instead."""
    expected: Checkpoint | None
    """The run's checkpoint after the last replayed step, to compare with the result; None if the run has none."""
    warnings: tuple[str, ...] = ()
    """Keys of the run's spec that this version ignores."""


def plan_replay(ledger: Ledger, run_id: str, start: int, end: int | None = None) -> ReplayPlan:
    """Make a plan from the ledger. If `end` is None, the replay ends after the last trained step. Raises NotFound if
    the run is unknown, if step `start` has no checkpoint, if a step was not trained, or if samples were not kept;
    SpecError if the spec is of another version and differs in more than unknown keys."""
    row = ledger.run(run_id)
    spec, warnings = spec_of_run(run_id, row["spec_yaml"])
    end = row["next_step"] if end is None else end
    if not 0 <= start < end <= row["next_step"]:
        raise NotFound(
            f"steps {start} to {end} cannot be replayed: run {run_id} has trained {row['next_step']} steps, and "
            "the first step must be before the last"
        )
    checkpoints = _checkpoints(ledger, run_id)
    if start and start not in checkpoints:
        steps = ", ".join(str(step) for step in sorted({0, *checkpoints} - {row["next_step"]}))
        raise NotFound(f"run {run_id} has no checkpoint after {start} steps; replay from one of: {steps}")
    sizes = ledger.rows(
        "SELECT step, world_size FROM receipts WHERE run_id = ? AND step >= ? AND step < ? ORDER BY step, session",
        (run_id, start, end),
    )
    gone = ledger.group_queries.first_step_without_payloads(run_id, start, end) if spec.samples else None
    if gone is not None:
        raise NotFound(f"the samples of step {gone} were not kept, because logger.keep_samples of the run is false")
    return ReplayPlan(
        run_id=run_id,
        spec=spec,
        start=start,
        end=end,
        ranks=max(size["world_size"] for size in sizes if size["step"] == start),
        steady=len({size["world_size"] for size in sizes}) == 1,
        threads=_threads(spec, [checkpoints[start]] if start else list(checkpoints.values())),
        checkpoint=checkpoints.get(start) if start else None,
        expected=checkpoints.get(end),
        warnings=tuple(warnings),
    )


def read_part(ledger: Ledger, plan: ReplayPlan, step: int, rank: int, world_size: int) -> list[Group]:
    """Return the groups that a rank of `world_size` trains in a step, scored. Raises Conflict for a changed group."""
    groups, run_id = [], plan.run_id
    for row in split_batch(ledger.db, run_id, step, world_size, plan.spec.completions_per_prompt)[rank]:
        payload = ledger.payload(run_id, row["group_id"])
        assert payload is not None, "plan_replay has checked the arrays"
        rewards = np.frombuffer(row["rewards"], "<f4").tolist()
        reference_row = ledger.payload(run_id, row["group_id"], "reference")
        reference = None if reference_row is None else read_frame(reference_row.arrays)
        group = decode_group(row["group_id"], read_frame(payload.arrays), rewards, reference)
        if group.digest(row["digest"]) != row["digest"]:
            raise Conflict(
                f"group {row['group_id']} of step {step} has changed since it was trained; its digest differs"
            )
        groups.append(group)
    return groups


def recorded_losses(ledger: Ledger, run_id: str) -> dict[int, float]:
    """Return the loss of every step as the run reported it when the step was first trained."""
    rows = ledger.db.execute(
        "SELECT json_extract(json, '$.step') AS step, json_extract(json, '$.loss') AS loss FROM events"
        " WHERE run_id = ? AND kind = 'step'",
        (run_id,),
    )
    return {row["step"]: row["loss"] for row in rows if row["loss"] is not None}


def _checkpoints(ledger: Ledger, run_id: str) -> dict[int, Checkpoint]:
    """Return the checkpoints that can be loaded, by step. If a step has several, the newest session's is returned."""
    rows = ledger.db.execute(
        "SELECT c.* FROM checkpoints c LEFT JOIN batches b ON b.run_id = c.run_id AND b.step = c.step - 1"
        " WHERE c.run_id = ? AND c.removed = 0 AND c.damaged = '' AND c.chain = COALESCE(b.chain, '') ORDER BY c.session",
        (run_id,),
    )
    return {row["step"]: ledger.checkpoints.from_row(row) for row in rows}


def _threads(spec: RunSpec, checkpoints: list[Checkpoint]) -> int:
    for checkpoint in checkpoints:
        try:
            return read_manifest(Folder(checkpoint.path))[0].num_threads
        except (NotFound, Conflict):
            continue
    return spec.cluster.threads_per_process

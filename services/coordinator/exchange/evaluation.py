"""Evaluates versions on validation prompts. The groups of an evaluation have a separate class, are pinned to one
version, and are part of neither batches nor token accounting.

One rollout worker that holds the version (or a newer one) is pinned: it takes no further weights until every group of
the evaluation is generated, while other workers continue. Scoring needs no pin. With an environment, the holders of the
evaluation's leases sample from the pinned worker. Tokens of another version are refused and generated again. The groups
of the newest evaluations and of the first one stay in the ledger (`logger.keep_evaluations`).

Suffixes: G groups (prompts), C completions of a group, F reward functions.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.advantages import Rewards, totals
from paceline.errors import Unreadable
from paceline.groups import FloatArray, Version
from paceline.services.coordinator.exchange.admission import SamplingWorker
from paceline.services.coordinator.exchange.batch_metrics import rewards_by_source, sources_of
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange, class_of
from paceline.services.coordinator.ledger.groups import State
from paceline.spec import RunSpec

FIRST_EVALUATION_GROUP = 1 << 40
"""Smallest group id of evaluations, far above the ids of groups to train."""

SCORED_BETWEEN = 3
"""Number of waiting groups to train that are scored between two groups of an evaluation, so that no batch waits."""


def begin(exchange: Exchange, run: ActiveRun, step: int) -> None:
    """Queue an evaluation of version `step`; if no worker holds this version any more, a newer one is evaluated. If the
    prompts cannot be read now, warn and skip the evaluation."""
    assert run.validation is not None
    if exchange.ledger.evaluations.exists(run.run_id, step):
        return
    first = FIRST_EVALUATION_GROUP + (step << 20)
    # Tasks are assigned by slot: those of the evaluation come after the admitted groups.
    slot = exchange.ledger.run(run.run_id)["next_slot"]
    number = min(len(run.validation), run.spec.grpo.max_val_samples)
    try:
        slots = range(slot, slot + SCORED_BETWEEN * number, SCORED_BETWEEN)
        groups = [(first + index, slot, *run.validation.draw(index)) for index, slot in enumerate(slots)]
    except Unreadable as error:
        exchange.notices.warn(
            f"the evaluation of version {step} is skipped, because its prompts cannot be read: {error}"
        )
        return
    exchange.ledger.evaluations.add(run.run_id, step)
    exchange.groups.admit(run.run_id, f"eval:{step}", groups)


def pending(exchange: Exchange, run: ActiveRun) -> sqlite3.Row | None:
    return exchange.ledger.evaluations.first_pending(run.run_id)


def pinned_member(exchange: Exchange, run: ActiveRun) -> str | None:
    """Return the rollout worker that is pinned for an evaluation; None if there is none."""
    row = pending(exchange, run)
    return row["member_id"] if row else None


def to_lease(exchange: Exchange, run: ActiveRun, member_id: str, version: Version, room: int) -> list[sqlite3.Row]:
    """Return up to `room` groups of an evaluation for this worker, and pin it to its version."""
    if run.validation is None:
        return []
    row = pending(exchange, run)
    if row is None or version.step < row["step"] or row["member_id"] not in (None, member_id):
        return []
    if not exchange.group_queries.has_ungenerated(run.run_id, f"eval:{row['step']}"):
        return []  # a new pin would restart the evaluation
    if row["member_id"] is None or (row["pinned_session"], row["pinned_step"]) != version:
        _pin(exchange, run, row["step"], member_id, version)
    return exchange.group_queries.free_to_evaluate(run.run_id, f"eval:{row['step']}", room)


def choose_sampler(exchange: Exchange, run: ActiveRun, samplers: Sequence[SamplingWorker]) -> SamplingWorker | None:
    """Return the rollout worker for the pending evaluation: the pinned one, else the first with the newest version.
    None if no evaluation is pending or no such worker serves."""
    row = pending(exchange, run) if run.validation is not None else None
    if row is None:
        return None
    if row["member_id"] is not None:
        return next((sampler for sampler in samplers if sampler.member_id == row["member_id"]), None)
    able = [sampler for sampler in samplers if sampler.version.step >= row["step"]]
    return max(able, key=lambda sampler: sampler.version, default=None)


def pinned_version(exchange: Exchange, run: ActiveRun, row: sqlite3.Row) -> Version:
    """Return the only version that tokens of an evaluation's group may have."""
    evaluation = exchange.ledger.evaluations.get(run.run_id, class_of(row).step)
    assert evaluation is not None
    return Version(evaluation["pinned_session"], evaluation["pinned_step"])


def unpin_if_generated(exchange: Exchange, run: ActiveRun, group_class: str) -> None:
    """Unpin an evaluation's worker once all groups are generated or dropped: it takes new weights during scoring."""
    row = pending(exchange, run)
    if row is None or row["member_id"] is None or group_class != f"eval:{row['step']}":
        return
    if not exchange.group_queries.has_ungenerated(run.run_id, group_class):
        exchange.ledger.evaluations.unpin_member(run.run_id, row["member_id"])
        exchange.notices.add("unpinned", member_id=row["member_id"])


def finish_if_done(exchange: Exchange, run: ActiveRun, group_class: str) -> None:
    """Record the result of an evaluation if all its groups are scored or dropped."""
    step = int(group_class.split(":")[1])
    if not exchange.group_queries.is_evaluated(run.run_id, group_class):
        unpin_if_generated(exchange, run, group_class)  # the last group may have been dropped
        return
    rows = exchange.group_queries.of_class(run.run_id, group_class)
    evaluation = pending(exchange, run)
    assert evaluation is not None
    pinned_step = evaluation["pinned_step"]
    result = {"step": pinned_step} | evaluation_result(run.spec, rows, pinned_step, sources_of(exchange, run, rows))
    exchange.ledger.evaluations.finish(run.run_id, step, result)
    _remove_surplus(exchange, run)
    exchange.notices.add("evaluated", requested_step=step, **result)


def fail(
    exchange: Exchange, run: ActiveRun, row: sqlite3.Row, work: str, reason: str, error: str, number: int, most: int
) -> None:
    """Count failure `number` of a group's `work`; drop the group if the number has reached `most`."""
    exchange.ledger.count(run.run_id, f"failures:{reason}")
    exchange.note_failure(run, row, work, reason, error, number, most)
    if number >= most:
        drop(exchange, run, row, reason, error)


def drop(exchange: Exchange, run: ActiveRun, row: sqlite3.Row, reason: str, error: str = "") -> None:
    exchange.drop(run, row, reason, error=error)
    if not class_of(row).trains:
        finish_if_done(exchange, run, row["class"])


def _remove_surplus(exchange: Exchange, run: ActiveRun) -> None:
    """Remove the groups of the oldest surplus evaluation. Those of the first evaluation stay for comparison."""
    logger = run.spec.logger
    ended = exchange.ledger.evaluations.ended_steps(run.run_id)
    if not logger.keep_samples or not logger.keep_evaluations:
        exchange.remove_groups(run.run_id, f"eval:{ended[-1]}")
    elif len(ended) > logger.keep_evaluations + 1:
        exchange.remove_groups(run.run_id, f"eval:{ended[-1 - logger.keep_evaluations]}")


def _pin(exchange: Exchange, run: ActiveRun, step: int, member_id: str, version: Version) -> None:
    exchange.ledger.evaluations.pin(run.run_id, step, member_id, *version)
    for group_id in exchange.groups.restart_evaluation(run.run_id, f"eval:{step}", member_id):
        exchange.ledger.remove_payloads(run.run_id, group_id)
        if run.spec.environment.is_used:
            exchange.ledger.episodes.remove_ended(run.run_id, group_id)
            exchange.groups.set_turns(run.run_id, group_id, 0, None)
    exchange.notices.add("pinned", member_id=member_id)


def evaluation_result(
    spec: RunSpec, rows: Sequence[sqlite3.Row | Mapping[str, Any]], step: int, sources: Sequence[object] | None = None
) -> dict[str, Any]:
    """Return the result of an evaluation of version `step`; `rows` are its scored and dropped groups. Rewards are means
    over prompts of the mean over a prompt's completions; None if no function gave a number. A standard error is the
    standard deviation of the prompts' means (n - 1) divided by sqrt(n); it is left out for fewer than two prompts.
    `pass@<k>/<function>` is the share with at least one 1 among the prompts whose k completions all got a number. It
    is given if all values of the function are 0 or 1 and k is above 1. `sources` are the rows' values of
    `data.source_key`, None without one."""
    scored = [row for row in rows if row["state"] == State.SCORED]
    k = spec.grpo.val_samples_per_prompt
    rewards_GCF = np.array([np.frombuffer(row["rewards"], "<f4") for row in scored], np.float32)
    rewards_GCF = rewards_GCF.reshape(len(scored), k, len(spec.rewards))
    rewards_SF = rewards_GCF.reshape(len(scored) * k, len(spec.rewards))
    totals_GC = totals(rewards_SF, spec.rewards, step).reshape(len(scored), k)
    mean, stderr = _mean(totals_GC)
    result: dict[str, Any] = {"reward": mean} | ({} if stderr is None else {"reward_stderr": stderr})
    for index, reward in enumerate(spec.rewards):
        values_GC = rewards_GCF[:, :, index]
        mean, stderr = _mean(values_GC)
        if mean is not None:
            result[f"reward/{reward.label}"] = mean
        if stderr is not None:
            result[f"reward_stderr/{reward.label}"] = stderr
        passed = _pass_at(values_GC)
        if passed is not None:
            result[f"pass@{k}/{reward.label}"] = passed
    if sources is not None:
        of_scored = [of for row, of in zip(rows, sources, strict=True) if row["state"] == State.SCORED]
        result |= rewards_by_source(totals_GC, of_scored)
    completions = len(scored) * k
    return result | {
        "prompts": len(scored),
        "samples": completions,
        "failed": len(rows) - len(scored),
        "completion_length": sum(row["tokens"] for row in scored) / max(1, completions),
    }


def _mean(values_GC: Rewards) -> tuple[float | None, float | None]:
    """Return the mean of the prompts' means and its standard error; None for too few prompts with a number."""
    scored_GC = ~np.isnan(values_GC)
    counts_G = scored_GC.sum(axis=1)
    sums_G = np.where(scored_GC, values_GC, 0.0).astype(np.float64).sum(axis=1)
    means = sums_G[counts_G > 0] / counts_G[counts_G > 0]
    if not len(means):
        return None, None
    # exactly 0 for equal numbers
    spread = float(means.std(ddof=1)) if (means != means[0]).any() else 0.0
    return float(means.mean()), spread / math.sqrt(len(means)) if len(means) > 1 else None


def _pass_at(values_GC: FloatArray) -> float | None:
    """Return the share with at least one 1 among the prompts whose completions all have a number; None unless there are
    several completions and all numbers are 0 or 1."""
    scored_GC = ~np.isnan(values_GC)
    whole_GC = values_GC[scored_GC.all(axis=1)]
    if not len(whole_GC) or values_GC.shape[1] == 1 or not np.isin(values_GC[scored_GC], (0.0, 1.0)).all():
        return None
    return float((whole_GC == 1.0).any(axis=1).mean())

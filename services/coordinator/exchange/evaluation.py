"""Evaluation: validation prompts in a separate class, pinned to one version, outside of batches and token accounting.

One rollout worker that holds the version (or a newer one) is pinned: it takes no further weights until every group of the
evaluation is generated, while the others go on. Scoring does not need it. With an environment, it is the one that the holders
of the evaluation's leases ask. Tokens of another version than the pinned one are refused and generated again. The groups
of the newest evaluations and of the first one stay in the ledger (`logger.keep_evaluations`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from paceline.errors import Unreadable
from paceline.groups import Group, Version
from paceline.services.coordinator.exchange.engines import Engine
from paceline.services.coordinator.exchange.evaluation_result import evaluation_result
from paceline.services.coordinator.exchange.group_sources import sources_of
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange

FIRST_EVALUATION_GROUP = 1 << 40
"""First group id of evaluations, far from those of groups that are trained."""

SCORED_BETWEEN = 3
"""Groups to train that are scored between two of an evaluation where both wait, because a whole evaluation at once would hold up
the batches for as long as it takes."""


def begin(exchange: Exchange, run: ActiveRun, step: int) -> None:
    """Queue an evaluation of version `step` or, once that is gone, of the next one that a worker holds. It is left out,
    with a warning, when its prompts cannot be read now.
    """
    assert run.validation is not None
    if exchange.ledger.evaluations.exists(run.run_id, step):
        return
    first = FIRST_EVALUATION_GROUP + (step << 20)
    # Tasks go out by slot: those of the evaluation stand behind the groups that are admitted.
    slot = exchange.ledger.run(run.run_id)["next_slot"]
    number = min(len(run.validation), run.spec.grpo.max_val_samples)
    try:
        groups = [
            (first + index, slot + SCORED_BETWEEN * index, *run.validation.draw(index))
            for index in range(number)
        ]
    except Unreadable as error:
        exchange.notice("warning", message=f"the evaluation of version {step} is left out: {error}")
        return
    exchange.ledger.evaluations.add(run.run_id, step)
    exchange.groups.admit(run.run_id, f"eval:{step}", groups)


def pending(exchange: Exchange, run: ActiveRun) -> sqlite3.Row | None:
    """Return the evaluation that comes next, if any."""
    return exchange.ledger.evaluations.first_pending(run.run_id)


def pinned_member(exchange: Exchange, run: ActiveRun) -> str | None:
    """Return the worker that must keep its version for now, if any."""
    row = pending(exchange, run)
    return row["member_id"] if row else None


def to_lease(
    exchange: Exchange, run: ActiveRun, member_id: str, version: Version, room: int
) -> list[sqlite3.Row]:
    """Return evaluation groups for this worker, and pin it to its version."""
    if run.validation is None:
        return []
    row = pending(exchange, run)
    if row is None or version.step < row["step"] or row["member_id"] not in (None, member_id):
        return []
    if not exchange.group_queries.has_ungenerated(run.run_id, f"eval:{row['step']}"):
        return []  # a pin would start it anew
    if row["member_id"] is None or (row["pinned_session"], row["pinned_step"]) != version:
        _pin(exchange, run, row["step"], member_id, version)
    return exchange.group_queries.free_to_evaluate(run.run_id, f"eval:{row['step']}", room)


def choose_engine(exchange: Exchange, run: ActiveRun, engines: Sequence[Engine]) -> Engine | None:
    """Return the engine for the evaluation that comes next: the pinned one, else the first of those with the newest version.
    None without an evaluation, and while no such engine serves.
    """
    row = pending(exchange, run) if run.validation is not None else None
    if row is None:
        return None
    if row["member_id"] is not None:
        return next((engine for engine in engines if engine.member_id == row["member_id"]), None)
    able = [engine for engine in engines if engine.version.step >= row["step"]]
    return max(able, key=lambda engine: engine.version, default=None)


def pinned_version(exchange: Exchange, run: ActiveRun, row: sqlite3.Row) -> Version:
    """Return the only version whose tokens count for a group of an evaluation."""
    evaluation = exchange.ledger.evaluations.get(run.run_id, int(row["class"].split(":")[1]))
    assert evaluation is not None
    return Version(evaluation["pinned_session"], evaluation["pinned_step"])


def is_of(group: Group, version: Version) -> bool:
    """Return whether every token was sampled under this version."""
    return all(span[:2] == version for c in group.completions for span in c.spans)


def unpin_member(exchange: Exchange, run: ActiveRun, member_id: str) -> None:
    """Unpin a worker that is gone: another one starts the evaluation anew."""
    exchange.ledger.evaluations.unpin_member(run.run_id, member_id)


def unpin_if_generated(exchange: Exchange, run: ActiveRun, kind: str) -> None:
    """Unpin the worker of an evaluation once every group of it is generated or dropped: it takes new weights while they are scored."""
    row = pending(exchange, run)
    if row is None or row["member_id"] is None or kind != f"eval:{row['step']}":
        return
    if not exchange.group_queries.has_ungenerated(run.run_id, kind):
        exchange.ledger.evaluations.unpin_member(run.run_id, row["member_id"])
        exchange.notice("unpinned", member_id=row["member_id"])


def finish_if_done(exchange: Exchange, run: ActiveRun, kind: str) -> None:
    """Record the result when every group of the evaluation is scored or dropped."""
    step = int(kind.split(":")[1])
    if not exchange.group_queries.is_evaluated(run.run_id, kind):
        unpin_if_generated(exchange, run, kind)  # the last group may have been dropped
        return
    rows = exchange.group_queries.of_class(run.run_id, kind)
    evaluation = pending(exchange, run)
    assert evaluation is not None
    pinned_step = evaluation["pinned_step"]
    result = {"step": pinned_step} | evaluation_result(
        run.spec, rows, pinned_step, sources_of(exchange, run, rows)
    )
    exchange.ledger.evaluations.finish(run.run_id, step, result)
    _remove_surplus(exchange, run)
    exchange.notice("evaluated", requested_step=step, **result)


def _remove_surplus(exchange: Exchange, run: ActiveRun) -> None:
    """Remove the groups of the evaluation that is not to be kept any more, now that one more has ended. The first one of
    the run stays, because later ones are compared with it.
    """
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
            exchange.groups.set_journal(run.run_id, group_id, 0, None)
    exchange.notice("pinned", member_id=member_id)

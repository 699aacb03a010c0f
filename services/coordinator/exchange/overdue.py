"""Workers that hold work which others could do: their leases and tasks go to others, and they get none before they
submit something.

`lease_durations.py` finds them; this module connects it to the ledger and acts on it.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.services.coordinator.exchange import evaluation, leases
from paceline.services.coordinator.exchange.engines import holds_leases
from paceline.services.coordinator.exchange.lease_durations import LeaseDurations, Overdue
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange
from paceline.v1 import common_pb2


def find(exchange: Exchange, run: ActiveRun, now_s: float) -> list[Overdue]:
    """Return the workers that hold leases or tasks for far longer than others need. Called every few seconds."""
    unable = exchange.overdue | exchange.suspected
    queries = exchange.group_queries
    found = exchange.lease_durations.check(
        now_s, queries.leases(run.run_id), _samplers(exchange, run) - unable
    )
    scorers = _able(exchange, common_pb2.ROLE_REWARD)
    return found + exchange.task_durations.check(now_s, queries.tasks(run.run_id), scorers - unable)


def _samplers(exchange: Exchange, run: ActiveRun) -> set[str]:
    """Return the workers that could take leases."""
    if holds_leases(run) == common_pb2.ROLE_ENVIRONMENT:
        return _able(exchange, common_pb2.ROLE_ENVIRONMENT)
    measured = evaluation.pending(exchange, run)
    oldest_step = 0 if measured is None else measured["step"]
    return {m for m, version in exchange.versions.items() if version.step >= oldest_step}


def _able(exchange: Exchange, role: common_pb2.Role.ValueType) -> set[str]:
    return {member.member_id for member in exchange.senders.of_role(role) if member.fault is None}


def revoke(exchange: Exchange, run: ActiveRun, found: Iterable[Overdue]) -> None:
    """Revoke the leases and tasks of overdue workers, in a transaction. A late result still counts if it is the first."""
    for member_id, why in found:
        taken = leases.revoke_work(exchange, [member_id], with_leases=True)
        evaluation.unpin_member(exchange, run, member_id)
        exchange.overdue.add(member_id)
        scores = _scores(exchange, member_id)
        nothing = "no task before it submits scores" if scores else "no lease before it submits a group"
        exchange.notice(
            "warning", message=f"{member_id} gets {nothing}, and others get the {taken} that it holds: {why}"
        )


def note_submission(
    exchange: Exchange, ages: LeaseDurations, member_id: str, group_id: int, attempt: int
) -> None:
    """Note that a worker submits results; one that was overdue gets work again."""
    ages.note_submission(member_id, group_id, attempt)
    if member_id in exchange.overdue:
        exchange.overdue.remove(member_id)
        what = "scores and gets tasks" if _scores(exchange, member_id) else "a group and gets leases"
        exchange.notice("warning", message=f"{member_id} has submitted {what} again")


def _scores(exchange: Exchange, member_id: str) -> bool:
    """Return whether this is a reward worker."""
    member = exchange.senders.get(member_id)
    return member is not None and member.role == common_pb2.ROLE_REWARD

"""Revokes the leases and tasks of workers that left, crashed or are overdue, and quarantines groups.
`requests/lease.py` leases groups, and revokes leases that their worker does not know.

Quarantine leases groups alone to find those that crash their workers, and drops those groups, so that one prompt cannot
end a pool. A worker's crash proves nothing about one of the many groups that it held, so each of them is counted as
present. A group that was present at SHARED_CRASHES crashes is quarantined: it is leased alone, to a worker that first
finishes its other work. It is dropped as `poison` after ALONE_CRASHES further crashes of workers that held nothing
else.

Promise: no group is dropped because of a network or host fault. A worker that falls silent on an open connection
(stopped, cut off, its host down) or that leaves normally has not crashed, and the count of a worker that returns is
removed. Generating and scoring are counted apart.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from paceline.services.coordinator.exchange import evaluation
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange
from paceline.v1 import common_pb2

SHARED_CRASHES = 2
"""Number of crashes of workers that held a group among others, after which the group is quarantined."""

ALONE_CRASHES = 2
"""Number of further crashes of workers that held only a quarantined group, after which the group is dropped."""


def revoke_work(exchange: Exchange, member_ids: list[str], *, with_leases: bool) -> int:
    """Revoke the score tasks and, with `with_leases`, the leases of silent or overdue workers. If such a worker
    returns, the first result of any attempt wins. Return the number of groups."""
    number = exchange.groups.revoke_tasks(member_ids)
    if with_leases:
        number += exchange.groups.revoke_leases(member_ids)
    return number


def revoke_from_member(exchange: Exchange, member_id: str, *, crashed: bool = False) -> int:
    """Revoke every lease and task of a former member; return the number of leases."""
    if (run := exchange.active) is not None:
        if crashed:
            on_crash(exchange, run, member_id)
        run.state.unreserve_all_of(member_id)
    exchange.workers.remove(member_id)
    released = exchange.groups.revoke_leases([member_id])
    exchange.groups.revoke_tasks([member_id])
    return released


def find_overdue(exchange: Exchange, run: ActiveRun, now_s: float) -> list[tuple[str, str]]:
    """Return the workers that hold leases or tasks for much longer than others need, each with the reason."""
    queries, workers = exchange.group_queries, exchange.workers
    unable = workers.overdue | workers.suspected
    samplers, scorers = _samplers(exchange, run) - unable, _able(exchange, common_pb2.ROLE_REWARD) - unable
    holders = workers.lease_durations.check(now_s, queries.leases(run.run_id), samplers)
    return holders + workers.task_durations.check(now_s, queries.tasks(run.run_id), scorers)


def _samplers(exchange: Exchange, run: ActiveRun) -> set[str]:
    if run.lease_role == common_pb2.ROLE_ENVIRONMENT:
        return _able(exchange, common_pb2.ROLE_ENVIRONMENT)
    measured = evaluation.pending(exchange, run)
    oldest_step = 0 if measured is None else measured["step"]
    return {m for m, version in exchange.workers.versions.items() if version.step >= oldest_step}


def _able(exchange: Exchange, role: common_pb2.Role.ValueType) -> set[str]:
    return {member.member_id for member in exchange.senders.of_role(role) if member.fault is None}


def revoke_overdue(exchange: Exchange, run: ActiveRun, overdue: Iterable[tuple[str, str]]) -> None:
    """Revoke the leases and tasks of overdue workers, in a transaction. A group's first result counts, even if late."""
    for member_id, why in overdue:
        number = revoke_work(exchange, [member_id], with_leases=True)
        exchange.ledger.evaluations.unpin_member(run.run_id, member_id)
        exchange.workers.note_overdue(member_id)
        work, result = ("task", "scores") if _scores(exchange, member_id) else ("lease", "a group")
        exchange.notices.warn(
            f"{member_id} gets no {work} before it submits {result}, and other workers get the {number} groups that it "
            f"holds: {why}"
        )


def _scores(exchange: Exchange, member_id: str) -> bool:
    member = exchange.senders.get(member_id)
    return member is not None and member.role == common_pb2.ROLE_REWARD


def choose_groups(
    exchange: Exchange, run: ActiveRun, member_id: str, rows: list[sqlite3.Row], room: int
) -> list[sqlite3.Row]:
    """Return the groups of `rows` that a worker may get: either one quarantined group alone, or up to `room` other
    groups. A waiting quarantined group reserves one worker, which gets nothing more until its other work is done.
    `rows` should exceed the room by the size of `run.state.reserved`, so that quarantined groups do not delay the
    others."""
    quarantined = quarantined_groups(exchange, run)
    if not quarantined or room <= 0:
        return rows[: max(room, 0)]
    held = {row["group_id"] for row in exchange.group_queries.work_of(run.run_id, member_id)}
    if quarantined & held:
        return []
    reserved = run.state.reserved
    for row in rows:
        group_id = row["group_id"]
        if group_id not in quarantined or reserved.get(group_id, member_id) != member_id:
            continue
        if group_id not in reserved and member_id in reserved.values():
            continue
        run.state.reserve(group_id, member_id)
        if held:
            return []
        run.state.unreserve(group_id)
        return [row]
    if member_id in reserved.values():
        return []
    return [row for row in rows if row["group_id"] not in quarantined][:room]


def quarantined_groups(exchange: Exchange, run: ActiveRun) -> set[int]:
    deaths_by_group = exchange.ledger.deaths.of_run(run.run_id)
    return {group_id for group_id, deaths in deaths_by_group.items() if deaths >= SHARED_CRASHES}


def on_crash(exchange: Exchange, run: ActiveRun, member_id: str) -> None:
    """Count a worker's crash for each of its groups, before its leases are revoked; drop groups that are proven
    causes."""
    for row in exchange.group_queries.work_of(run.run_id, member_id):
        _count_death(exchange, run, row, member_id, member_id)


def on_score_crash(exchange: Exchange, run: ActiveRun, row: sqlite3.Row, member_id: str) -> None:
    """Count the crash of a process that scored the group. The process's worker stays alive, so each crash counts
    separately, and none is removed when the worker returns."""
    _count_death(exchange, run, row, f"{member_id} scoring attempt {row['score_attempt']}", member_id)


def _count_death(exchange: Exchange, run: ActiveRun, row: sqlite3.Row, death: str, member_id: str) -> None:
    """Count a crash for a group, and drop the group at the limit. `death` names the crash; each name counts once."""
    deaths = exchange.ledger.deaths.add(run.run_id, row["group_id"], death)
    if deaths == SHARED_CRASHES:
        exchange.notices.warn(
            f"group {row['group_id']} was present when {deaths} workers died; from now on it is leased alone"
        )
    elif deaths >= SHARED_CRASHES + ALONE_CRASHES:
        exchange.notices.warn(
            f"group {row['group_id']} was dropped: {deaths} workers died while they held it; the last "
            f"{ALONE_CRASHES} held only this group; check its prompt and the log of {member_id}"
        )
        evaluation.drop(exchange, run, row, "poison")


def clear_deaths(exchange: Exchange, run: ActiveRun, group_id: int) -> None:
    """Reset the crash count of a generated or scored group, so that scoring counts from 0."""
    if group_id in exchange.ledger.deaths.of_run(run.run_id):
        exchange.ledger.deaths.remove_group(run.run_id, group_id)
    run.state.unreserve(group_id)

"""Groups that end their workers: they are found by leasing them alone, then dropped, so that one prompt cannot end a
pool.

A worker's crash proves nothing about one of the many groups that it held. So every group that it held is counted as
present; a group that was present at SHARED_CRASHES crashes is quarantined: from then on it is leased alone, to a worker
that first finishes its other work. It is dropped(poison) when ALONE_CRASHES more workers have crashed with nothing else in hand.

The promise: a group is never dropped because of a fault of a network or a host. A worker that falls silent on a standing connection (stopped, cut
off, its host gone) has not crashed, a worker that leaves in good order has not either, and the count of a worker that
returns is removed. Generating and scoring are counted apart.
"""

from __future__ import annotations

import sqlite3

from paceline.services.coordinator.exchange import evaluation
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange

SHARED_CRASHES = 2
"""Crashes at which a group was present among others before it is quarantined."""

ALONE_CRASHES = 2
"""Further crashes, with the group alone in hand, after which it is dropped."""


def choose(
    exchange: Exchange, run: ActiveRun, member_id: str, rows: list[sqlite3.Row], room: int
) -> list[sqlite3.Row]:
    """Return the groups of `rows` that a worker may get: either one quarantined group alone, or up to `room` others. A
    quarantined group that waits reserves one worker, which gets nothing more until its other work is done. `rows`
    should have `exchange.reserved` more than there is room for, so that quarantined groups do not delay the others."""
    quarantined = quarantined_groups(exchange, run)
    if not quarantined or room <= 0:
        return rows[: max(room, 0)]
    held = {row["group_id"] for row in exchange.group_queries.work_of(run.run_id, member_id)}
    if quarantined & held:
        return []
    reserved = exchange.reserved
    for row in rows:
        group_id = row["group_id"]
        if group_id not in quarantined or reserved.get(group_id, member_id) != member_id:
            continue
        if group_id not in reserved and member_id in reserved.values():
            continue
        reserved[group_id] = member_id
        if held:
            return []
        del reserved[group_id]
        return [row]
    if member_id in reserved.values():
        return []
    return [row for row in rows if row["group_id"] not in quarantined][:room]


def quarantined_groups(exchange: Exchange, run: ActiveRun) -> set[int]:
    deaths_by_group = exchange.ledger.deaths.of_run(run.run_id)
    return {group_id for group_id, deaths in deaths_by_group.items() if deaths >= SHARED_CRASHES}


def on_crash(exchange: Exchange, run: ActiveRun, member_id: str) -> None:
    """Count the crash of a worker for each group that it held, before its leases are revoked; drop groups that are
    proven to cause crashes."""
    for row in exchange.group_queries.work_of(run.run_id, member_id):
        _count(exchange, run, row, member_id, member_id)


def on_score_crash(exchange: Exchange, run: ActiveRun, row: sqlite3.Row, member_id: str) -> None:
    """Count the crash of a process that scored the group. Its worker lives on, so each of its crashes counts by itself,
    and none is removed when the worker returns."""
    _count(exchange, run, row, f"{member_id} scoring attempt {row['score_attempt']}", member_id)


def _count(exchange: Exchange, run: ActiveRun, row: sqlite3.Row, death: str, member_id: str) -> None:
    """Count a death, by its name, for a group; drop the group when the limit is reached."""
    deaths = exchange.ledger.deaths.add(run.run_id, row["group_id"], death)
    if deaths == SHARED_CRASHES:
        exchange.warn(
            f"group {row['group_id']} was present when {deaths} workers died; from now on it is leased alone"
        )
    elif deaths >= SHARED_CRASHES + ALONE_CRASHES:
        exchange.warn(
            f"group {row['group_id']} was dropped: {deaths} workers died with it, the last "
            f"{ALONE_CRASHES} with it alone; check its prompt and the log of {member_id}"
        )
        evaluation.drop(exchange, run, row, "poison")


def clear(exchange: Exchange, run: ActiveRun, group_id: int) -> None:
    """Reset the count of a group that a worker has finished; scoring counts anew."""
    if group_id in exchange.ledger.deaths.of_run(run.run_id):
        exchange.ledger.deaths.remove_group(run.run_id, group_id)
    exchange.reserved.pop(group_id, None)

"""Stores fixed and replaced batches, the ranks' receipts and the ends of sessions; computes digest, chain and split of
a batch. Digest and chain identify a batch and everything trained before it: the coordinator, `ledger verify` and
every rank compute them from their own records. The split over the ranks is the same for every rank that asks."""

from __future__ import annotations

import functools
import hashlib
import heapq
import json
import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from paceline.services.coordinator.ledger.database import Queries
from paceline.services.coordinator.ledger.group_queries import GroupQueries
from paceline.v1 import exchange_pb2 as pb


class NewBatch(NamedTuple):
    digest: str
    """Digest over the digests of the batch's groups, in order."""
    chain: str
    metrics: Mapping[str, float]
    revision: int
    """Number of earlier batches of the step that this one replaces."""


class Batches(Queries):
    """The fixed batches; a batch's key is its run and its step. Call changing methods inside a transaction."""

    def get(self, run_id: str, step: int) -> sqlite3.Row | None:
        """Return the fixed batch of a step; None if there is none, as in a run without batches."""
        return self.row("SELECT * FROM batches WHERE run_id = ? AND step = ?", (run_id, step))

    def add(self, run_id: str, step: int, batch: NewBatch) -> None:
        self.db.execute(
            "INSERT INTO batches (run_id, step, digest, chain, metrics_json, revision, with_scores)"
            " VALUES (?, ?, ?, ?, ?, ?, 1)",
            (run_id, step, batch.digest, batch.chain, json.dumps(batch.metrics), batch.revision),
        )

    def mark_trained(self, run_id: str, step: int) -> None:
        self.db.execute("UPDATE batches SET trained = 1 WHERE run_id = ? AND step = ?", (run_id, step))

    def replace(self, batch: sqlite3.Row, group_ids: Sequence[int], dropped_ids: Collection[int], reason: str) -> None:
        """Move a batch with `group_ids` to the table of replaced batches; its next revision lacks `dropped_ids`."""
        key, of_groups = ((batch["run_id"], batch["step"]), (json.dumps(group_ids), json.dumps(sorted(dropped_ids))))
        self.db.execute(
            "INSERT INTO replaced_batches (run_id, step, revision, digest, chain, group_ids, dropped_ids, reason)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (*key, batch["revision"], batch["digest"], batch["chain"], *of_groups, reason),
        )
        self.db.execute("DELETE FROM batches WHERE run_id = ? AND step = ?", key)

    def last_replaced(self, run_id: str, step: int) -> sqlite3.Row | None:
        """Return revision and chain of the newest replaced batch of the step."""
        return self.row(
            "SELECT revision, chain FROM replaced_batches WHERE run_id = ? AND step = ? ORDER BY revision DESC LIMIT 1",
            (run_id, step),
        )


def batch_digest(groups: Sequence[sqlite3.Row]) -> str:
    """Return SHA-256 over id, digest and scores digest of a batch's groups in order; `groups` are their rows."""
    content = [[group["group_id"], group["digest"], group["scores_digest"]] for group in groups]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def extend_chain(chain: str, step: int, digest: str) -> str:
    """Return the hash chain over the batches up to and including `step`."""
    return hashlib.sha256(f"{chain}/{step}/{digest}".encode()).hexdigest()


MAX_SPLITS = 8
"""Largest number of splits in the cache: that of the current step, and some that a later session trains again."""

Split = list[list[sqlite3.Row]]


def split_batch(db: sqlite3.Connection, run_id: str, step: int, world_size: int, sharing: int = 1) -> Split:
    """Return the batch of `step` split over the ranks; empty for a run without batches. `sharing`: number of
    completions whose prompt the learner computes once (`RunSpec.completions_per_prompt`)."""
    groups = GroupQueries(db).of_step(run_id, step)
    if not groups:
        return []
    of_groups = [(group["tokens"], group["sequence_tokens"]) for group in groups]
    parts = balance([own + (with_prompts - own) // sharing for own, with_prompts in of_groups], world_size)
    return [[groups[index] for index in part] for part in parts]


class Splits:
    """Newest splits. The key is the chain's link, which identifies one batch despite revisions and rollbacks."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._batches = Batches(db)
        self._split = functools.lru_cache(MAX_SPLITS)(lambda chain, *of_step: split_batch(db, *of_step))

    def get(self, run_id: str, step: int, world_size: int, sharing: int) -> Split:
        batch = self._batches.get(run_id, step)
        return [] if batch is None else self._split(batch["chain"], run_id, step, world_size, sharing)


def balance(tokens: list[int], world_size: int) -> list[list[int]]:
    """Return the indices of `tokens` for each of `world_size` ranks, each list ascending. Longest processing time first
    (Graham, 1969): the next longest goes to the rank with the fewest tokens, ties to the lower rank, so the same
    input always gives the same split. The largest part is at most 4/3 - 1/(3·ranks) times that of the best split."""
    loads = [(0, rank) for rank in range(world_size)]
    parts: list[list[int]] = [[] for _ in range(world_size)]
    for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        load, rank = heapq.heappop(loads)
        parts[rank].append(index)
        heapq.heappush(loads, (load + tokens[index], rank))
    return [sorted(part) for part in parts]


class Receipts(Queries):
    """The receipts; the key is run, session, step and rank. Call changing methods inside a transaction."""

    def add(self, run_id: str, session: int, receipt: pb.Receipt) -> None:
        """Record a receipt in place of an earlier one of the same rank."""
        self.db.execute(
            "INSERT OR REPLACE INTO receipts"
            " (run_id, session, step, rank, world_size, group_ids, digests, tokens, scores_digests)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                run_id,
                session,
                receipt.step,
                receipt.rank,
                receipt.world_size,
                json.dumps([group.group_id for group in receipt.groups]),
                json.dumps([group.digest for group in receipt.groups]),
                receipt.tokens,
                json.dumps([group.scores_digest for group in receipt.groups]),
            ),
        )

    def count(self, run_id: str, session: int, step: int, world_size: int) -> int:
        """Return the number of ranks, out of `world_size`, with a receipt of the step in the session."""
        return int(
            self.value(
                "SELECT COUNT(*) AS n FROM receipts WHERE run_id = ? AND session = ? AND step = ? AND world_size = ?",
                (run_id, session, step, world_size),
            )
        )

    def has_rank_0(self, run_id: str, session: int, step: int) -> bool:
        """Return whether rank 0 of the session has trained the step."""
        return (
            self.row(
                "SELECT 1 FROM receipts WHERE run_id = ? AND session = ? AND step = ? AND rank = 0",
                (run_id, session, step),
            )
            is not None
        )

    def has_any(self, run_id: str, sessions: Iterable[int], step: int) -> bool:
        """Return whether any rank of these sessions has trained its part of the step."""
        query = "SELECT 1 FROM receipts WHERE run_id = ? AND session = ? AND step = ? LIMIT 1"
        return any(self.row(query, (run_id, session, step)) for session in sessions)

    def remove(self, run_id: str, sessions: Iterable[int], step: int) -> None:
        self.db.executemany(
            "DELETE FROM receipts WHERE run_id = ? AND session = ? AND step = ?",
            [(run_id, session, step) for session in sessions],
        )


IN_HAND = "in hand"
"""Kind of a row without a fault: the session was served its part of a step; the message is its number of ranks."""


class SessionFault(NamedTuple):
    session: int
    step: int
    kind: str
    """Type of the exception, or a kind from `exchange/batches/session_faults.py`."""
    message: str


class SessionFaults(Queries):
    """The ends of sessions; a row's key is its run and its session. Call changing methods inside a transaction."""

    def set_in_hand(self, run_id: str, session: int, step: int, world_size: int) -> None:
        """Record the step that a session trains, unless the session has a fault."""
        self.db.execute(
            "INSERT INTO session_faults (run_id, session, step, kind, message) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT DO UPDATE SET step = excluded.step, message = excluded.message WHERE kind = excluded.kind",
            (run_id, session, step, IN_HAND, str(world_size)),
        )

    def in_hand(self, run_id: str) -> tuple[int, int, int] | None:
        """Return session, step and number of ranks of the newest session that is training a step."""
        row = self.row(
            "SELECT session, step, message FROM session_faults WHERE run_id = ? AND kind = ? ORDER BY session DESC LIMIT 1",
            (run_id, IN_HAND),
        )
        return None if row is None else (row["session"], row["step"], int(row["message"]))

    def add(self, run_id: str, fault: SessionFault, *, outranks: str) -> bool:
        """Record a session's first fault, or one whose kind is `outranks`; return whether it was added."""
        added = self.db.execute(
            "INSERT INTO session_faults (run_id, session, step, kind, message) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT DO UPDATE SET step = excluded.step, kind = excluded.kind, message = excluded.message"
            " WHERE kind = ? OR excluded.kind = ?",
            (run_id, *fault, IN_HAND, outranks),
        ).rowcount
        return added > 0

    def newest(self, run_id: str, limit: int) -> list[SessionFault]:
        """Return the newest faults, newest first."""
        rows = self.rows(
            "SELECT session, step, kind, message FROM session_faults WHERE run_id = ? AND kind != ?"
            " ORDER BY session DESC LIMIT ?",
            (run_id, IN_HAND, limit),
        )
        return [SessionFault(*row[:4]) for row in rows]

    def remove_step(self, run_id: str, step: int) -> None:
        self.db.execute("DELETE FROM session_faults WHERE run_id = ? AND step = ?", (run_id, step))

    def remove_in_hand(self, run_id: str, session: int) -> None:
        """Remove the step that a session was training, because the session left normally."""
        self.db.execute(
            "DELETE FROM session_faults WHERE run_id = ? AND session = ? AND kind = ?", (run_id, session, IN_HAND)
        )

    def remove_run(self, run_id: str) -> None:
        self.db.execute("DELETE FROM session_faults WHERE run_id = ?", (run_id,))

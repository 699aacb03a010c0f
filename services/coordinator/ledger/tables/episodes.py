"""Stores the turn logs of runs with an environment: finished turns of open groups, and untrained lives of samples.

A sample has one life at a time. Its turns are in the table `episodes`; if the life ends untrained, they are removed and
a row in the table `restarts` keeps their cost. The turns of a group are removed when its result, which has their
tokens, is committed; its rows in `restarts` stay, because the token accounting is recomputed from them.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from paceline.services.coordinator.ledger import row_checksums
from paceline.services.coordinator.ledger.database import Queries
from paceline.services.coordinator.ledger.segments import DamagedRecord, Location

LEFT_OUT = "left_out"
"""Drop reason of turns that are not part of a trained sample."""

FAILED = "environment_failed"
"""Reason for the end of a life by a fault of the user's code."""

RESTARTED = "restarted"
"""Reason for the end of a life that was lost with its process."""

OF_SAMPLE = "run_id = ? AND group_id = ? AND sample = ? AND life = ?"


class FinishedTurn(NamedTuple):
    run_id: str
    group_id: int
    sample: int
    life: int
    turn: int
    last: bool
    left_out: str
    """JSON list of left-out turns, set in the last turn."""
    row_index: int
    num_rows: int
    row_tokens: int
    tokens: int
    oldest_step: int
    digest: str
    context_digest: str


class EndedLife(NamedTuple):
    """Columns of a sample's life, or of a part of a life, that was not trained."""

    run_id: str
    group_id: int
    sample: int
    life: int
    reason: str
    error: str
    turns: int
    tokens: int
    given_up: bool
    counts: bool


class Lives(NamedTuple):
    current: int
    """Number of the current life, from 1."""
    failures: int
    """Number of lives that ended by a fault of the environment and count against the limit."""
    given_up: bool


class Total(NamedTuple):
    tokens: int
    oldest_step: int | None
    """Oldest step among the tokens' versions; None without a turn."""


class Episodes(Queries):
    """The finished turns; the key is run, group, sample, life and number. Call changing methods inside a
    transaction."""

    # Turns

    def last_turn(self, run_id: str, group_id: int, sample: int, life: int) -> sqlite3.Row | None:
        return self.row(
            f"SELECT * FROM episodes WHERE {OF_SAMPLE} ORDER BY turn DESC LIMIT 1", (run_id, group_id, sample, life)
        )

    def row_tokens(self, run_id: str, group_id: int, sample: int, life: int, row_index: int) -> int:
        """Return the number of tokens in a row of a sample; 0 for a new one."""
        row = self.row(
            f"SELECT row_tokens FROM episodes WHERE {OF_SAMPLE} AND row_index = ? ORDER BY turn DESC LIMIT 1",
            (run_id, group_id, sample, life, row_index),
        )
        return 0 if row is None else int(row[0])

    def add(self, turn: FinishedTurn, location: Location) -> None:
        """Record a turn and its bytes' location. The statement seals the row: a trigger would cost as much again."""
        row = turn._asdict() | {"last": int(turn.last)} | location._asdict()
        self.db.execute(
            f"INSERT INTO episodes ({', '.join(row)}, seal) VALUES ({', '.join('?' * len(row))}, ?)",
            (*row.values(), row_checksums.of("episodes", row)),
        )

    def of_group(self, run_id: str, group_id: int) -> list[sqlite3.Row]:
        """Return the turns of a group, by sample, life and turn."""
        return self.rows(
            "SELECT * FROM episodes WHERE run_id = ? AND group_id = ? ORDER BY sample, life, turn", (run_id, group_id)
        )

    def total(self, run_id: str, group_id: int) -> Total:
        """Return the tokens of a group's turns and the oldest version among them."""
        query = "SELECT COALESCE(SUM(tokens), 0), MIN(oldest_step) FROM episodes WHERE run_id = ? AND group_id = ?"
        return Total(*self.rows(query, (run_id, group_id))[0])

    def damaged(self, run_id: str, damaged: DamagedRecord) -> sqlite3.Row | None:
        """Return the turn whose bytes a damaged record holds."""
        return self.row(
            "SELECT * FROM episodes INDEXED BY segment_episodes WHERE segment = ? AND run_id = ?"
            " AND (start = ? OR start + header_size = ?)",
            (damaged.segment, run_id, damaged.start, damaged.start),
        )

    def remove(self, run_id: str, group_id: int) -> list[sqlite3.Row]:
        """Remove the turns of a group. Return (segment, start) of each."""
        return self.rows(
            "DELETE FROM episodes WHERE run_id = ? AND group_id = ? RETURNING segment, start", (run_id, group_id)
        )

    # Lives

    def lives(self, run_id: str, group_id: int, sample: int) -> Lives:
        return self.lives_of_group(run_id, group_id).get(sample, Lives(1, 0, False))

    def lives_of_group(self, run_id: str, group_id: int) -> dict[int, Lives]:
        """Return a summary of the lives of each sample that has ended lives. The key is the sample."""
        rows = self.rows(
            "SELECT sample, MAX(life) + 1, SUM(counts), MAX(given_up) FROM restarts WHERE run_id = ? AND group_id = ?"
            " GROUP BY sample ORDER BY sample",
            (run_id, group_id),
        )
        return {row[0]: Lives(row[1], row[2], bool(row[3])) for row in rows}

    def ended(self, run_id: str, group_id: int) -> list[sqlite3.Row]:
        """Return the ended lives of a group's samples, in order."""
        return self.rows(
            "SELECT * FROM restarts WHERE run_id = ? AND group_id = ? ORDER BY sample, life", (run_id, group_id)
        )

    def end(self, life: EndedLife) -> list[sqlite3.Row]:
        """Record the end of a life and remove its turns. Return (segment, start) of each."""
        self.add_ended([life])
        return self.rows(f"DELETE FROM episodes WHERE {OF_SAMPLE} RETURNING segment, start", life[:4])

    def add_ended(self, lives: Sequence[EndedLife]) -> None:
        """Record ended lives without removing their turns."""
        rows = [life._asdict() | {"given_up": int(life.given_up), "counts": int(life.counts)} for life in lives]
        self.db.executemany(
            f"INSERT INTO restarts ({', '.join(EndedLife._fields)}, seal)"
            f" VALUES ({', '.join('?' * len(EndedLife._fields))}, ?)",
            [(*row.values(), row_checksums.of("restarts", row)) for row in rows],
        )

    def remove_ended(self, run_id: str, group_id: int) -> None:
        """Remove the ended lives of an evaluation's group, because the group is generated again."""
        self.db.execute("DELETE FROM restarts WHERE run_id = ? AND group_id = ?", (run_id, group_id))

    def clear_failures(self, run_id: str) -> None:
        """Reset failures of samples in unleased groups after a person removed the cause; given-up samples begin
        again."""
        self.db.execute(
            "UPDATE restarts SET counts = 0, given_up = 0 WHERE run_id = ? AND counts + given_up > 0 AND group_id IN"
            " (SELECT group_id FROM groups WHERE run_id = ? AND state = 'admitted')",
            (run_id, run_id),
        )

    def remove_class(self, run_id: str, group_class: str) -> list[sqlite3.Row]:
        """Remove turns and ended lives of an evaluation's groups. Return (segment, start) of the turns."""
        in_class = "SELECT group_id FROM groups INDEXED BY groups_by_state WHERE run_id = ? AND class = ?"
        self.db.execute(
            f"DELETE FROM restarts WHERE run_id = ? AND group_id IN ({in_class})", (run_id, run_id, group_class)
        )
        return self.rows(
            f"DELETE FROM episodes WHERE run_id = ? AND group_id IN ({in_class}) RETURNING segment, start",
            (run_id, run_id, group_class),
        )

    def tokens_by_reason(self, run_id: str) -> dict[str, int]:
        """Return the number of tokens in ended lives of the groups to train. The key is the reason."""
        rows = self.rows(
            "SELECT r.reason, SUM(r.tokens) FROM restarts r JOIN groups g USING (run_id, group_id)"
            " WHERE run_id = ? AND g.class = 'train' GROUP BY r.reason",
            (run_id,),
        )
        return {str(row[0]): int(row[1]) for row in rows}


def left_out_of(row: sqlite3.Row) -> frozenset[int]:
    """Return the indices of turns that are not part of a sample's rows; `row` is that of its last turn."""
    return frozenset(json.loads(row["left_out"]))

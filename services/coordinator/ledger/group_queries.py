"""Reads the table `groups`; `groups.py` has the statements that change it. Every query of a request uses an index,
because a table scan reads every group that the run ever had. Two small tables are here too: crashes of workers that
held a group, and free slots of dropped groups, which the next admitted groups get."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection

from paceline.services.coordinator.ledger.connection import LedgerFile
from paceline.services.coordinator.ledger.database import Queries
from paceline.services.coordinator.ledger.groups import OPEN_STATES

BATCH_COLUMNS = "group_id, class, slot, digest, scores_digest, tokens, sequence_tokens, oldest_step, rewards, reward"
"""The columns that batches need. Other columns are not read, because thousands of rows are read at a time."""

MAX_GROUP_ID = 2**63 - 1
"""Largest group id: SQLite's largest integer."""
OPEN_SQL = str(tuple(state.value for state in OPEN_STATES))
OF_CLASS = "FROM groups INDEXED BY groups_by_state WHERE run_id = ? AND class = ?"
TO_TRAIN = "FROM groups INDEXED BY groups_by_state WHERE run_id = ? AND class = 'train'"


class GroupQueries(Queries):
    """Reads groups; rows have the table's columns unless the method says otherwise."""

    # One group, or those of a step

    def get(self, run_id: str, group_id: int) -> sqlite3.Row | None:
        if group_id > MAX_GROUP_ID:
            return None
        return self.row("SELECT * FROM groups WHERE run_id = ? AND group_id = ?", (run_id, group_id))

    def prompt(self, run_id: str, group_id: int) -> str | None:
        """Return the prompt of a group as JSON; None for an unknown group."""
        query = "SELECT prompt_json FROM prompts WHERE run_id = ? AND group_id = ?"
        prompt: str | None = self.value(query, (run_id, group_id))
        return prompt

    def columns(self, run_id: str, group_id: int) -> str:
        """Return the columns of a group's data set row besides the prompt, as a JSON object."""
        query = "SELECT columns_json FROM prompts WHERE run_id = ? AND group_id = ?"
        return str(self.value(query, (run_id, group_id)) or "{}")

    def column_values(self, run_id: str, group_ids: Collection[int], name: str) -> dict[int, object]:
        """Return the values of the data set's column `name`; None if a group lacks it. The key is the group id."""
        path = f"$.{json.dumps(name)}"
        rows = self.db.execute(
            "SELECT group_id, CASE WHEN json_valid(columns_json) THEN json_extract(columns_json, ?) END AS value"
            " FROM prompts WHERE run_id = ? AND group_id IN (SELECT value FROM json_each(?))",
            (path, run_id, json.dumps(sorted(group_ids))),
        )
        return {row["group_id"]: row["value"] for row in rows}

    def of_step(self, run_id: str, step: int) -> list[sqlite3.Row]:
        """Return the groups of a step's batch, in the batch's order; none for a run without batches."""
        return self.rows(
            f"SELECT {BATCH_COLUMNS} FROM groups INDEXED BY step_groups WHERE run_id = ? AND step = ? ORDER BY rank_order",
            (run_id, step),
        )

    def first_step_without_payloads(self, run_id: str, start: int, end: int) -> int | None:
        """Return the first step in [start, end) with a group whose result is no longer stored."""
        row = self.row(
            "SELECT step FROM groups g INDEXED BY step_groups WHERE run_id = ? AND step IS NOT NULL AND step >= ?"
            " AND step < ? AND NOT EXISTS (SELECT 1 FROM payloads p WHERE p.run_id = g.run_id AND p.group_id = g.group_id"
            " AND p.kind = 'result') ORDER BY step LIMIT 1",
            (run_id, start, end),
        )
        return None if row is None else int(row["step"])

    # Free groups, oldest slot first, with their prompts

    def free_to_lease(self, run_id: str, limit: int) -> list[sqlite3.Row]:
        """Return the first admitted groups to train."""
        return self.rows(
            "SELECT g.*, p.prompt_json FROM (SELECT run_id, group_id, slot, attempt, oldest_step, holders"
            " FROM groups INDEXED BY groups_by_state WHERE run_id = ?"
            " AND class = 'train' AND state = 'admitted' ORDER BY slot, group_id LIMIT ?) g"
            " JOIN prompts p USING (run_id, group_id) ORDER BY slot, group_id",
            (run_id, limit),
        )

    def free_to_evaluate(self, run_id: str, group_class: str, limit: int) -> list[sqlite3.Row]:
        """Return the first admitted groups of an evaluation."""
        return self.rows(
            "SELECT g.*, p.prompt_json FROM groups g JOIN prompts p USING (run_id, group_id)"
            " WHERE g.run_id = ? AND class = ? AND state = 'admitted' ORDER BY slot LIMIT ?",
            (run_id, group_class, limit),
        )

    def free_to_score(self, run_id: str, limit: int) -> list[sqlite3.Row]:
        """Return the first generated groups without a scorer, those with the fewest failures first."""
        return self.rows(
            "SELECT g.*, p.prompt_json, p.columns_json FROM (SELECT * FROM groups INDEXED BY free_tasks WHERE run_id = ?"
            " AND state = 'generated' AND scorer_id IS NULL ORDER BY score_failures, slot, group_id LIMIT ?) g"
            " JOIN prompts p USING (run_id, group_id) ORDER BY score_failures, slot, group_id",
            (run_id, limit),
        )

    # Groups that workers hold

    def work_of(self, run_id: str, member_id: str) -> list[sqlite3.Row]:
        return self.rows(
            "SELECT * FROM groups WHERE state = 'leased' AND member_id = ? AND run_id = ? UNION ALL"
            " SELECT * FROM groups WHERE state = 'generated' AND scorer_id = ? AND run_id = ?",
            (member_id, run_id) * 2,
        )

    def leased_by_member(self, run_id: str, member_ids: Collection[str]) -> dict[str, set[int]]:
        leased: dict[str, set[int]] = {member_id: set() for member_id in member_ids}
        for member_id, group_id in self.db.execute(
            "SELECT member_id, group_id FROM groups INDEXED BY held_groups WHERE run_id = ? AND state = 'leased'"
            " AND member_id IN (SELECT value FROM json_each(?))",
            (run_id, json.dumps(list(leased))),
        ):
            leased[member_id].add(group_id)
        return leased

    def leases(self, run_id: str) -> list[tuple[str, int, int]]:
        """Return member, group and attempt of every lease."""
        rows = self.rows(
            "SELECT member_id, group_id, attempt FROM groups INDEXED BY held_groups WHERE state = 'leased' AND run_id = ?",
            (run_id,),
        )
        return [(row[0], row[1], row[2]) for row in rows]

    def tasks(self, run_id: str) -> list[tuple[str, int, int]]:
        """Return scorer, group and attempt of every score task."""
        rows = self.rows(
            "SELECT scorer_id, group_id, score_attempt FROM groups INDEXED BY held_tasks WHERE state = 'generated'"
            " AND scorer_id IS NOT NULL AND run_id = ?",
            (run_id,),
        )
        return [(row[0], row[1], row[2]) for row in rows]

    def num_held(self) -> dict[str, int]:
        """Return the number of leases and score tasks of each member, over all runs."""
        rows = self.db.execute(
            "SELECT member_id AS id, COUNT(*) AS n FROM groups WHERE state = 'leased' GROUP BY member_id UNION ALL"
            " SELECT scorer_id, COUNT(*) FROM groups WHERE state = 'generated' AND scorer_id IS NOT NULL"
            " GROUP BY scorer_id"
        )
        return {row["id"]: row["n"] for row in rows}

    # Groups of a class

    def open_of_class(self, run_id: str, group_class: str) -> list[sqlite3.Row]:
        return self.rows(f"SELECT * {OF_CLASS} AND state IN {OPEN_SQL}", (run_id, group_class))

    def of_class(self, run_id: str, group_class: str) -> list[sqlite3.Row]:
        """Return id, state, rewards and tokens of every group of a class."""
        return self.rows(f"SELECT group_id, state, rewards, tokens {OF_CLASS}", (run_id, group_class))

    def has_ungenerated(self, run_id: str, group_class: str) -> bool:
        """Return whether a group of an evaluation is not generated yet."""
        query = f"SELECT 1 {OF_CLASS} AND state IN ('admitted', 'leased') LIMIT 1"
        return self.row(query, (run_id, group_class)) is not None

    def is_evaluated(self, run_id: str, group_class: str) -> bool:
        """Return whether every group of an evaluation is scored or dropped."""
        query = f"SELECT 1 {OF_CLASS} AND state IN ('admitted', 'leased', 'generated') LIMIT 1"
        return self.row(query, (run_id, group_class)) is None

    # Groups to train, by state

    def num_waiting(self, run_id: str, start: int, end: int) -> int:
        """Return the number of open, unbatched groups in slots [start, end)."""
        states = "state IN ('admitted', 'leased', 'generated', 'scored')"
        query = f"SELECT COUNT(*) {TO_TRAIN} AND {states} AND slot >= ? AND slot < ?"
        return int(self.value(query, (run_id, start, end)))

    def in_progress(self, run_id: str) -> list[sqlite3.Row]:
        """Return the leased and generated groups, with state, holder and oldest version that the tokens can have."""
        return self.rows(
            f"SELECT COALESCE(oldest_step, lease_step) AS oldest, state, member_id {TO_TRAIN}"
            " AND state IN ('leased', 'generated')",
            (run_id,),
        )

    def num_scored(self, run_id: str) -> int:
        """Return the number of groups that a batch could get."""
        return int(self.value(f"SELECT COUNT(*) {TO_TRAIN} AND state = 'scored'", (run_id,)))

    def scored(self, run_id: str) -> list[sqlite3.Row]:
        """Return the groups that a batch could get, in the order of their slots."""
        query = f"SELECT {BATCH_COLUMNS} {TO_TRAIN} AND state = 'scored' ORDER BY slot, group_id"
        return self.rows(query, (run_id,))

    def scored_in(self, run_id: str, start: int, end: int) -> list[sqlite3.Row]:
        """Return the scored groups of slots [start, end), in the order of their slots."""
        query = f"SELECT {BATCH_COLUMNS} {TO_TRAIN} AND state = 'scored' AND slot >= ? AND slot < ? ORDER BY slot"
        return self.rows(query, (run_id, start, end))

    def first_under_way(self, run_id: str, reason: str) -> int | None:
        """Return the id of the first group in scoring (reason `reward_failed`) or generation; None if there is none."""
        under_way = "state = 'leased'"
        if reason == "reward_failed":
            under_way = "state = 'generated' AND scorer_id IS NOT NULL"
        first: int | None = self.value(f"SELECT MIN(group_id) {TO_TRAIN} AND {under_way}", (run_id,))
        return first

    def num_open(self, run_id: str) -> dict[str, int]:
        """Return the number of groups in each open state."""
        query = f"SELECT state, COUNT(*) AS n {TO_TRAIN} AND state IN {OPEN_SQL} GROUP BY state"
        return {state.value: 0 for state in OPEN_STATES} | {
            row["state"]: row["n"] for row in self.rows(query, (run_id,))
        }

    def open_tokens(self, run_id: str) -> int:
        """Return the number of committed tokens of groups that have not ended."""
        return int(self.value(f"SELECT COALESCE(SUM(tokens), 0) {TO_TRAIN} AND state IN {OPEN_SQL}", (run_id,)))

    def completions_per_group(self, run_id: str) -> int:
        """Return the number of completions in a trained group, equal for all groups of a run; 0 if none is trained."""
        query = (
            "SELECT LENGTH(rewards) / 4 / json_array_length(functions) FROM groups INDEXED BY step_groups"
            " WHERE run_id = ? AND step >= 0 LIMIT 1"
        )
        return int(self.value(query, (run_id,)) or 0)


DEATHS = "deaths"
"""Cache key of the number of crashes by group."""


class Deaths:
    """Crashes of workers that held a group. Methods that change rows are called inside a transaction of the ledger."""

    def __init__(self, ledger: LedgerFile):
        self._ledger = ledger

    def add(self, run_id: str, group_id: int, name: str) -> int:
        """Record a crash for a group; the same name counts once. Return the group's number of crashes."""
        self._ledger.db.execute(
            "INSERT OR IGNORE INTO deaths (run_id, group_id, member_id) VALUES (?, ?, ?)", (run_id, group_id, name)
        )
        self._ledger.invalidate(DEATHS)
        return int(
            self._ledger.value("SELECT COUNT(*) AS n FROM deaths WHERE run_id = ? AND group_id = ?", (run_id, group_id))
        )

    def remove_member(self, member_id: str) -> None:
        """Remove the crashes of a member that turned out to be alive."""
        self._ledger.db.execute("DELETE FROM deaths WHERE member_id = ?", (member_id,))
        self._ledger.invalidate(DEATHS)

    def remove_group(self, run_id: str, group_id: int) -> None:
        self._ledger.db.execute("DELETE FROM deaths WHERE run_id = ? AND group_id = ?", (run_id, group_id))
        self._ledger.invalidate(DEATHS)

    def remove_run(self, run_id: str) -> None:
        self._ledger.db.execute("DELETE FROM deaths WHERE run_id = ?", (run_id,))
        self._ledger.invalidate(DEATHS)

    def of_run(self, run_id: str) -> dict[int, int]:
        """Return the number of crashes by group; cached until one changes."""

        def read() -> dict[str, dict[int, int]]:
            deaths: dict[str, dict[int, int]] = {}
            for run, group_id, number in self._ledger.db.execute(
                "SELECT run_id, group_id, COUNT(*) FROM deaths GROUP BY run_id, group_id"
            ):
                deaths.setdefault(run, {})[group_id] = number
            return deaths

        return self._ledger.cached(DEATHS, read).get(run_id, {})


class FreeSlots(Queries):
    """Slots of dropped groups. Methods that change rows are called inside a transaction of the ledger."""

    def exist(self, run_id: str) -> bool:
        return self.row("SELECT 1 FROM free_slots WHERE run_id = ? LIMIT 1", (run_id,)) is not None

    def first(self, run_id: str, limit: int) -> list[int]:
        """Return the lowest free slots, in order."""
        rows = self.rows("SELECT slot FROM free_slots WHERE run_id = ? ORDER BY slot LIMIT ?", (run_id, limit))
        return [row["slot"] for row in rows]

    def add(self, run_id: str, slot: int) -> None:
        self.db.execute("INSERT OR IGNORE INTO free_slots VALUES (?, ?)", (run_id, slot))

    def remove(self, run_id: str, slot: int) -> None:
        self.db.execute("DELETE FROM free_slots WHERE run_id = ? AND slot = ?", (run_id, slot))

"""Moves groups between their states, with one method for each transition.

    admitted ──► leased ──► generated ──► scored ──► batched(step) ──► trained(step)
       └───────────┴────────────┴───────────┴────────────┴──► dropped(reason)

A late result commits a group that was admitted again: admitted → generated. Groups of an evaluation end as scored, may
be restarted (`restart_evaluation`), and are deleted with it (`remove`).

Back: leased → admitted if the worker is gone or returned it, generated and scored → admitted if the payload is lost,
batched → scored if the batch is taken apart. Methods run inside a transaction of the ledger and decide nothing: the
exchange decides. Every statement names the states that its transition starts from. A method raises Conflict if a group
is in none of them, because the exchange has read the state in the same transaction; revocations and restorations skip
such groups. The statement that ends a group also seals its row.
"""

from __future__ import annotations

import enum
import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from paceline.errors import Conflict
from paceline.services.coordinator.ledger import row_checksums
from paceline.services.coordinator.ledger.database import Queries

INSERTED_AT_ONCE = 64
"""Largest number of groups that one statement inserts."""

MAX_INSERTED_CHARS = 16 << 20
"""Characters of prompts and columns after which a statement takes no further group: SQLite accepts 1 GB at most."""


class State(enum.StrEnum):
    ADMITTED = "admitted"
    LEASED = "leased"
    GENERATED = "generated"
    SCORED = "scored"
    BATCHED = "batched"
    TRAINED = "trained"
    DROPPED = "dropped"


OPEN_STATES = (State.ADMITTED, State.LEASED, State.GENERATED, State.SCORED, State.BATCHED)
"""States of groups that have not ended."""


class NewLease(NamedTuple):
    run_id: str
    group_id: int
    member_id: str
    attempt: int
    lease_step: int
    """Step of the oldest version that the tokens can have; `Lease.step` on the wire is the step the group is for."""
    holders: str
    """All holders of the group's leases, including the holder of this one."""


class Generated(NamedTuple):
    tokens: int
    """Number of completion tokens."""
    sequence_tokens: int
    """Number of prompt and completion tokens."""
    oldest_step: int
    """Step of the oldest version among the tokens."""
    digest: str


class Scored(NamedTuple):
    rewards: bytes
    """[C, F] rewards as float32, little endian."""
    scores_digest: str
    functions: str
    """Names of the F functions, as a JSON list."""
    reward: float | None
    """Mean weighted reward; None without a reward."""


class Groups(Queries):
    """The transitions, in the order of a group's life. `group_queries.py` reads groups."""

    # Admission

    def admit(self, run_id: str, group_class: str, groups: Iterable[tuple[int, int, object, object]]) -> None:
        """Insert new groups of a class: id, slot, prompt, columns. There are few statements, because
        other threads may run between two of them."""
        rows: list[dict[str, object]] = []
        num_chars = 0
        for group_id, slot, prompt, columns in groups:
            prompt_json, columns_json = json.dumps(prompt), json.dumps(columns, default=str)
            row = {"run_id": run_id, "group_id": group_id, "prompt_json": prompt_json, "columns_json": columns_json}
            rows.append({**row, "seal": row_checksums.of("prompts", row), "slot": slot})
            num_chars += len(prompt_json) + len(columns_json)
            if len(rows) == INSERTED_AT_ONCE or num_chars > MAX_INSERTED_CHARS:
                self._insert(group_class, rows)
                rows, num_chars = [], 0
        if rows:
            self._insert(group_class, rows)

    def _insert(self, group_class: str, rows: Sequence[Mapping[str, object]]) -> None:
        as_json = json.dumps(rows)
        self.db.execute(
            "INSERT INTO groups (run_id, group_id, class, state, slot)"
            " SELECT json_extract(value, '$.run_id'), json_extract(value, '$.group_id'), ?, 'admitted',"
            " json_extract(value, '$.slot') FROM json_each(?)",
            (group_class, as_json),
        )
        self.db.execute(
            "INSERT INTO prompts (run_id, group_id, prompt_json, columns_json, seal)"
            " SELECT json_extract(value, '$.run_id'), json_extract(value, '$.group_id'),"
            " json_extract(value, '$.prompt_json'), json_extract(value, '$.columns_json'), json_extract(value, '$.seal')"
            " FROM json_each(?)",
            (as_json,),
        )

    def _move(self, run_id: str, group_id: int, *states: State, **columns: object) -> None:
        """Set columns of a group. Raises Conflict unless it is in one of the states."""
        changed = self.db.execute(
            f"UPDATE groups SET {', '.join(f'{name} = ?' for name in columns)} WHERE run_id = ? AND group_id = ?"
            f" AND state IN ({', '.join('?' * len(states))})",
            (*columns.values(), run_id, group_id, *states),
        )
        _check(changed, [group_id], *states)

    # Leases: admitted → leased, and back

    def lease(self, leases: Sequence[NewLease]) -> None:
        changed = self.db.execute(
            # The run is among the values, so that SQLite looks up each group instead of reading all groups of the run.
            "UPDATE groups SET state = 'leased', member_id = json_extract(lease.value, '$[2]'),"
            " attempt = json_extract(lease.value, '$[3]'), lease_step = json_extract(lease.value, '$[4]'),"
            " holders = json_extract(lease.value, '$[5]')"
            " FROM json_each(?) AS lease WHERE run_id = json_extract(lease.value, '$[0]')"
            " AND group_id = json_extract(lease.value, '$[1]') AND state = 'admitted'",
            (json.dumps(leases),),
        )
        _check(changed, [lease.group_id for lease in leases], State.ADMITTED)

    def restore_leases(self, run_id: str, member_id: str, group_ids: Sequence[int]) -> None:
        """Lease these groups to the member again, in the same attempt, if they are admitted and still have its name."""
        self.db.execute(
            "UPDATE groups SET state = 'leased' WHERE run_id = ? AND state = 'admitted' AND member_id = ?"
            " AND group_id IN (SELECT value FROM json_each(?))",
            (run_id, member_id, json.dumps(group_ids)),
        )

    def end_lease(self, run_id: str, group_id: int, member_id: str, attempt: int) -> None:
        """End the lease of this attempt: the group returns to `admitted`, without the member's name."""
        self.db.execute(
            "UPDATE groups SET state = 'admitted', member_id = NULL WHERE run_id = ? AND group_id = ?"
            " AND state = 'leased' AND member_id = ? AND attempt = ?",
            (run_id, group_id, member_id, attempt),
        )

    def revoke_unknown(self, run_id: str, member_id: str, held: Sequence[int]) -> None:
        """Revoke the member's leases of groups that are not in `held`, and clear the member's name there."""
        self.db.execute(
            "UPDATE groups SET state = 'admitted', member_id = NULL WHERE run_id = ? AND member_id = ?"
            " AND state = 'leased' AND group_id NOT IN (SELECT value FROM json_each(?))",
            (run_id, member_id, json.dumps(held)),
        )

    def revoke_leases(self, member_ids: Sequence[str]) -> int:
        """Revoke all leases of the members; return their number. Groups keep the names, for `restore_leases`."""
        return self.db.execute(
            "UPDATE groups SET state = 'admitted' WHERE state = 'leased'"
            " AND member_id IN (SELECT value FROM json_each(?))",
            (json.dumps(member_ids),),
        ).rowcount

    def revoke_class(self, run_id: str, group_class: str) -> None:
        self.db.execute(
            "UPDATE groups INDEXED BY groups_by_state SET state = 'admitted'"
            " WHERE run_id = ? AND class = ? AND state = 'leased'",
            (run_id, group_class),
        )
        self.db.execute(
            "UPDATE groups INDEXED BY groups_by_state SET scorer_id = NULL"
            " WHERE run_id = ? AND class = ? AND state = 'generated'",
            (run_id, group_class),
        )

    def clear_holder(self, run_id: str, group_id: int) -> None:
        """Remove the last holder's name from an admitted group, so that `restore_leases` does not lease it again."""
        self._move(run_id, group_id, State.ADMITTED, member_id=None)

    def set_prefix_step(self, run_id: str, group_id: int, oldest_step: int | None) -> None:
        """Set the oldest version of the returned prefix; None without one. A group with a result keeps its version."""
        self.db.execute(
            "UPDATE groups SET oldest_step = ? WHERE run_id = ? AND group_id = ? AND state IN ('admitted', 'leased')",
            (oldest_step, run_id, group_id),
        )

    def set_turns(self, run_id: str, group_id: int, tokens: int, oldest_step: int | None) -> None:
        """Set the total of an open group's logged turns: its tokens, and the oldest version among them."""
        self._move(run_id, group_id, State.ADMITTED, State.LEASED, tokens=tokens, oldest_step=oldest_step)

    def readmit(self, run_id: str, group_id: int) -> None:
        """Return an admitted or leased group to `admitted`, without a holder."""
        self._move(run_id, group_id, State.ADMITTED, State.LEASED, state=State.ADMITTED, member_id=None)

    def fail_generation(self, run_id: str, group_id: int, failures: int) -> None:
        """Return a leased group to `admitted` after an attempt that failed because of the group's data."""
        back = {"state": State.ADMITTED, "member_id": None, "generation_failures": failures}
        self._move(run_id, group_id, State.LEASED, **back)

    def clear_failures(self, run_id: str) -> None:
        """Reset the failed attempts of open groups, because a person has removed the cause."""
        self.db.execute(
            "UPDATE groups SET generation_failures = 0, score_failures = 0 WHERE run_id = ?"
            " AND state IN ('admitted', 'leased', 'generated') AND generation_failures + score_failures > 0",
            (run_id,),
        )

    # Generation: admitted or leased → generated, and back

    def commit(self, run_id: str, group_id: int, generated: Generated) -> None:
        """Record the result of an attempt at a group that is not generated yet."""
        result = {"state": State.GENERATED, "member_id": None, **generated._asdict()}
        self._move(run_id, group_id, State.ADMITTED, State.LEASED, **result)

    def generate_again(self, run_id: str, group_id: int) -> None:
        """Reset a generated or scored group to `admitted`, as before its generation; `unbatch` a batched one first."""
        empty = dict.fromkeys(("member_id", "scorer_id", "oldest_step", "digest", "rewards", "functions", "reward"))
        numbers = {"tokens": 0, "sequence_tokens": 0, "scores_digest": ""}
        self._move(run_id, group_id, State.GENERATED, State.SCORED, state=State.ADMITTED, **empty, **numbers)

    def restart_evaluation(self, run_id: str, group_class: str, member_id: str) -> list[int]:
        """Admit an evaluation's groups again, except dropped ones and those leased to the member. Return their ids."""
        readmitted = self.db.execute(
            "UPDATE groups INDEXED BY groups_by_state SET state = 'admitted', member_id = NULL, scorer_id = NULL"
            " WHERE run_id = ? AND class = ? AND state != 'dropped' AND NOT (state = 'leased' AND member_id = ?)"
            " RETURNING group_id",
            (run_id, group_class, member_id),
        )
        return [group_id for (group_id,) in readmitted.fetchall()]

    # Score tasks: a generated group is assigned to a scorer, and the task is revoked

    def assign_scorer(self, run_id: str, group_id: int, member_id: str, attempt: int, scorers: str) -> None:
        """Assign a generated group to a reward worker; `scorers` names all its scorers."""
        task = {"scorer_id": member_id, "score_attempt": attempt, "scorers": scorers}
        self._move(run_id, group_id, State.GENERATED, **task)

    def end_task(self, run_id: str, group_id: int, member_id: str, attempt: int) -> None:
        self.db.execute(
            "UPDATE groups SET scorer_id = NULL WHERE run_id = ? AND group_id = ? AND state = 'generated'"
            " AND scorer_id = ? AND score_attempt = ?",
            (run_id, group_id, member_id, attempt),
        )

    def revoke_unknown_tasks(self, run_id: str, member_id: str, held: Sequence[int]) -> None:
        self.db.execute(
            "UPDATE groups SET scorer_id = NULL WHERE run_id = ? AND scorer_id = ? AND state = 'generated'"
            " AND group_id NOT IN (SELECT value FROM json_each(?))",
            (run_id, member_id, json.dumps(held)),
        )

    def revoke_tasks(self, member_ids: Sequence[str]) -> int:
        """Revoke all tasks of the members. Return their number."""
        return self.db.execute(
            "UPDATE groups SET scorer_id = NULL WHERE state = 'generated' AND scorer_id IN (SELECT value FROM json_each(?))",
            (json.dumps(member_ids),),
        ).rowcount

    def fail_scoring(self, run_id: str, group_id: int, failures: int) -> None:
        self._move(run_id, group_id, State.GENERATED, scorer_id=None, score_failures=failures)

    # Scores and batches: generated → scored → batched → trained

    def score(self, run_id: str, group_id: int, scored: Scored) -> None:
        self._move(run_id, group_id, State.GENERATED, state=State.SCORED, scorer_id=None, **scored._asdict())

    def batch(self, run_id: str, step: int, group_ids: Sequence[int]) -> None:
        """Make scored groups the batch of a step, in this order."""
        changed = self.db.executemany(
            "UPDATE groups SET state = 'batched', step = ?, rank_order = ? WHERE run_id = ? AND group_id = ?"
            " AND state = 'scored'",
            [(step, index, run_id, group_id) for index, group_id in enumerate(group_ids)],
        )
        _check(changed, group_ids, State.SCORED)

    def unbatch(self, run_id: str, step: int, group_ids: Sequence[int]) -> None:
        """Take apart the batch of a step that has these groups: they return to `scored`, with their scores."""
        changed = self.db.execute(
            "UPDATE groups INDEXED BY step_groups SET state = 'scored', step = NULL, rank_order = NULL"
            " WHERE run_id = ? AND step = ? AND state = 'batched'",
            (run_id, step),
        )
        _check(changed, group_ids, State.BATCHED)

    def train(self, run_id: str, step: int) -> tuple[int, int]:
        """Mark the groups of a step as trained. Return their number and their tokens."""
        ((number, tokens),) = self.rows(
            "SELECT COUNT(*), SUM(tokens) FROM groups INDEXED BY step_groups WHERE run_id = ? AND step = ?",
            (run_id, step),
        )
        sealed = row_checksums.assignment(state="'trained'")
        changed = self.db.execute(
            f"UPDATE groups INDEXED BY step_groups SET state = 'trained', {sealed} WHERE run_id = ? AND step = ?"
            " AND state = 'batched'",
            (run_id, step),
        )
        if changed.rowcount != number:
            raise Conflict(f"only {changed.rowcount} of the {number} groups of step {step} are batched")
        return number, tokens

    # End without training

    def drop(self, run_id: str, group_id: int, reason: str) -> None:
        becomes = {"state": "'dropped'", "reason": "?1", "member_id": "NULL", "scorer_id": "NULL"}
        changed = self.db.execute(
            f"UPDATE groups SET {', '.join(f'{name} = {value}' for name, value in becomes.items())},"
            f" {row_checksums.assignment(**becomes)} WHERE run_id = ?2 AND group_id = ?3"
            " AND state IN ('admitted', 'leased', 'generated', 'scored', 'batched')",
            (reason, run_id, group_id),
        )
        _check(changed, [group_id], *OPEN_STATES)

    def remove(self, run_id: str, group_class: str) -> list[sqlite3.Row]:
        """Delete an evaluation's groups, prompts and payloads, in few statements. Return (segment, start) of
        payloads."""
        of_class = "FROM groups INDEXED BY groups_by_state WHERE run_id = ? AND class = ?"
        of_groups = f"WHERE run_id = ? AND group_id IN (SELECT group_id {of_class})"
        values = (run_id, run_id, group_class)
        removed = self.rows(f"DELETE FROM payloads {of_groups} RETURNING segment, start", values)
        self.db.execute(f"DELETE FROM prompts {of_groups}", values)
        self.db.execute(f"DELETE {of_class}", (run_id, group_class))
        return removed


def _check(changed: sqlite3.Cursor, group_ids: Sequence[int], *states: State) -> None:
    """Raise Conflict unless the statement has changed one row for each of the groups."""
    if changed.rowcount != len(group_ids):
        raise Conflict(
            f"only {changed.rowcount} of {len(group_ids)} groups are {' or '.join(states)}, but the transaction "
            f"requires all to be: groups {list(group_ids[:8])}"
        )

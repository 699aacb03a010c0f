"""Comparison of the journals of open groups with their arrays, and of ended lives with the groups; a part of `verify`."""

from __future__ import annotations

import json
import sqlite3
from typing import TYPE_CHECKING

from paceline.groups import Version
from paceline.services.coordinator.audit.evidence import read_checked
from paceline.services.coordinator.exchange.uploads.turn_checks import context_digest, turn_digest
from paceline.services.coordinator.ledger.groups import State
from paceline.services.coordinator.ledger.integrity.report import VerifyReport
from paceline.wire import TurnArrays

if TYPE_CHECKING:
    from paceline.services.coordinator.audit.record import Record

Life = tuple[int, int, int]
"""Group, sample and number of a life."""

WAITING = (State.ADMITTED, State.LEASED)
"""States of groups that have a journal."""


def episodes(record: Record, report: VerifyReport) -> None:
    """Check that each turn is what its arrays are and follows the one before, that a group has the tokens of its journal
    until it has its result, and that the lives of a sample are numbered without a gap.
    """
    turns = record.db.execute(
        "SELECT * FROM episodes WHERE run_id = ? ORDER BY group_id, sample, life, turn", (record.run_id,)
    ).fetchall()
    ended = record.db.execute(
        "SELECT * FROM restarts WHERE run_id = ? ORDER BY group_id, sample, life", (record.run_id,)
    ).fetchall()
    if not turns and not ended and not record.spec.environment.is_used:
        return
    lives: dict[Life, list[sqlite3.Row]] = {}
    for turn in turns:
        lives.setdefault((turn["group_id"], turn["sample"], turn["life"]), []).append(turn)
        subject = f"turn {turn['turn']} of sample {turn['sample']} of group {turn['group_id']}"
        with report.reading(subject, "its arrays"):
            _compare_turn(record, report, subject, turn)
    _lives(report, lives, ended)
    for life, of_life in lives.items():
        _order(report, life, of_life)
    _groups(record, report, turns, ended)
    report.facts |= {"journaled_turns": len(turns), "ended_lives": len(ended)}


def _compare_turn(record: Record, report: VerifyReport, subject: str, turn: sqlite3.Row) -> None:
    arrays = TurnArrays.decode(read_checked(record.ledger, turn)[1])
    digest = turn_digest(arrays.token_ids, arrays.logprobs, arrays.spans)
    report.compare(subject, "its arrays give the digest {}, on record is {}", digest, turn["digest"])
    digest = context_digest(arrays.context_ids)
    text = "the tokens before it give the digest {}, on record is {}"
    report.compare(subject, text, digest, turn["context_digest"])
    report.compare(subject, "it has {} tokens, on record are {}", len(arrays.token_ids), turn["tokens"])
    oldest = min(Version(*span[:2]).step for span in arrays.spans)
    report.compare(subject, "its oldest version is {}, on record {}", oldest, turn["oldest_step"])
    report.compare(subject, "it is of row {}, on record of {}", arrays.row, turn["row_index"])
    left_out = json.loads(turn["left_out"])
    if not set(left_out) <= set(range(turn["turn"] + 1)) or (left_out and not turn["last"]):
        report.problem(subject, f"it leaves out turns {left_out[:8]}")


def _order(report: VerifyReport, life: Life, turns: list[sqlite3.Row]) -> None:
    """Compare the running numbers of a life's turns with the turns themselves."""
    subject = f"sample {life[1]} of group {life[0]}"
    numbers = [turn["turn"] for turn in turns]
    report.compare(subject, "its turns are {}, expected {}", numbers, list(range(len(turns))))
    if any(turn["last"] for turn in turns[:-1]):
        report.problem(subject, "it has turns after its last one")
    num_rows = 0
    for turn in turns:
        if turn["row_index"] > num_rows:
            report.problem(
                subject, f"turn {turn['turn']} is of row {turn['row_index']}, there are {num_rows}"
            )
        num_rows = max(num_rows, turn["row_index"] + 1)
        report.compare(subject, "it has {} rows, on record are {}", num_rows, turn["num_rows"])


def _lives(report: VerifyReport, lives: dict[Life, list[sqlite3.Row]], ended: list[sqlite3.Row]) -> None:
    """Check that a sample's ended lives are 1, 2, … and that the life of its turns is the next."""
    last: dict[tuple[int, int], sqlite3.Row] = {}
    for row in ended:
        key = (row["group_id"], row["sample"])
        subject = f"sample {key[1]} of group {key[0]}"
        report.compare(subject, "its ended life is {}, expected {}", row["life"], _next_life(last.get(key)))
        last[key] = row
    for group_id, sample, life in lives:
        before = last.get((group_id, sample))
        subject = f"sample {sample} of group {group_id}"
        report.compare(subject, "its turns are of life {}, expected {}", life, _next_life(before))
        if before is not None and before["given_up"]:
            report.problem(subject, "it was given up, but has turns")


def _next_life(before: sqlite3.Row | None) -> int:
    return 1 if before is None else int(before["life"]) + 1


def _groups(record: Record, report: VerifyReport, turns: list[sqlite3.Row], ended: list[sqlite3.Row]) -> None:
    """Compare every group with its journal."""
    tokens: dict[int, int] = {}
    oldest: dict[int, int] = {}
    for turn in turns:
        group_id = turn["group_id"]
        tokens[group_id] = tokens.get(group_id, 0) + turn["tokens"]
        oldest[group_id] = min(turn["oldest_step"], oldest.get(group_id, turn["oldest_step"]))
    rows = record.db.execute(
        "SELECT group_id, state, tokens, oldest_step FROM groups WHERE run_id = ?", (record.run_id,)
    ).fetchall()
    known = {row["group_id"] for row in rows}
    for row in rows:
        subject, group_id = f"group {row['group_id']}", row["group_id"]
        if row["state"] not in WAITING:
            if group_id in tokens:
                report.problem(subject, f"it is {row['state']}, but its journal is still there")
            continue
        text = "it has {} tokens, its journal has {}"
        report.compare(subject, text, row["tokens"], tokens.get(group_id, 0))
        text = "its oldest version is {}, its journal's {}"
        report.compare(subject, text, row["oldest_step"], oldest.get(group_id))
    for table, found in (("episodes", turns), ("restarts", ended)):
        missing = sorted({row["group_id"] for row in found} - known)
        if missing:
            report.problem(
                f"groups {missing[:5]}", f"they have rows in the table {table}, but are not on record"
            )

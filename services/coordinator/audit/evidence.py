"""Compares the messages of ranks and workers with the ledger's groups, batches and turns: the second part of `verify`.

Ranks sent receipts, rollout workers arrays, reward workers rewards and the reference's log-probabilities. None of them
reads the ledger's sums, so agreement means that the trained groups are those that were generated and scored.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from paceline.array_frames import Buffer
from paceline.errors import LedgerFault
from paceline.groups import FloatArray, Group, Version, scores_digest
from paceline.services.coordinator.exchange.uploads.intake import context_digest, turn_digest
from paceline.services.coordinator.ledger.file_check import VerifyReport
from paceline.services.coordinator.ledger.groups import State
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.spec import RunSpec
from paceline.wire import CompletionArrays, TurnArrays, decode_reference, decode_result, split_rows


@dataclass(frozen=True)
class RunRows:
    ledger: Ledger
    run: sqlite3.Row
    spec: RunSpec
    counters: dict[str, int]
    groups: list[sqlite3.Row]
    """Training groups in the order of their ids, without texts."""
    batches: list[sqlite3.Row]
    of_step: dict[int, list[sqlite3.Row]]
    """The groups of each step's batch, in the order of the batch. The key is the step."""
    deep: bool
    """True if the files of every checkpoint are read, not only those of the newest."""

    def rows(self, query: str, *values: object) -> list[sqlite3.Row]:
        """Return the rows of a query whose first parameter is the run's id."""
        return self.ledger.rows(query, (self.run_id, *values))

    @property
    def run_id(self) -> str:
        return str(self.run["run_id"])

    @property
    def has_batches(self) -> bool:
        """Return whether the exchange makes this run's batches; a supervised learner reads its data itself."""
        return self.spec.samples


KINDS = ("result", "prefix", "reference")
STATES_WITH_RESULT = ("generated", "scored", "batched")


def receipts(of_run: RunRows, report: VerifyReport) -> None:
    """Compare receipts with batches: every session's receipts match the batch, every trained step has receipts of all
    ranks of one session, and no group is in two steps. A session that died in a step, or that replays it, lacks
    receipts of some ranks."""
    rows = of_run.rows("SELECT * FROM receipts WHERE run_id = ? ORDER BY step, session, rank")
    lives: dict[tuple[int, int], list[sqlite3.Row]] = {}
    for row in rows:
        lives.setdefault((row["step"], row["session"]), []).append(row)
    step_of: dict[int, int] = {}
    complete: dict[int, int] = {}
    for (step, session), received in lives.items():
        subject = f"step {step}, session {session}"
        with report.reading(subject, "a receipt"):
            if session > of_run.run["session"]:
                report.problem(subject, "a receipt of a session that has not begun")
            for row in received:
                for group_id in json.loads(row["group_ids"]):
                    if step_of.setdefault(group_id, step) != step:
                        report.problem(subject, f"group {group_id} was trained in step {step_of[group_id]} too")
            whole = [row["rank"] for row in received] == list(range(received[0]["world_size"]))
            if whole:
                complete[step] = session
            if of_run.has_batches:
                _compare_with_batch(of_run, report, subject, step, received, whole)
    for step in range(of_run.run["next_step"]):
        if step not in complete:
            report.problem(f"step {step}", "no session has receipts of all ranks for this trained step")
    report.facts |= {"receipts": len(rows), "sessions": sorted(set(complete.values()))}


def payloads(of_run: RunRows, report: VerifyReport) -> None:
    """Compare the stored arrays with digest, tokens, age and the rewards' shape in the ledger."""
    measured = of_run.rows(
        "SELECT group_id, state, tokens, sequence_tokens, oldest_step, digest, rewards, functions FROM groups"
        " WHERE run_id = ? AND class != 'train' AND state = 'scored'"
    )
    groups = {g["group_id"]: g for g in (*of_run.groups, *measured)}
    group_ids = {row[0] for row in of_run.rows("SELECT group_id FROM groups WHERE run_id = ?")}
    found: set[int] = set()
    for stored in _stored(of_run):
        row, subject = groups.get(stored["group_id"]), f"group {stored['group_id']}"
        if stored["kind"] not in KINDS or stored["group_id"] not in group_ids:
            report.problem(subject, f"the kind {stored['kind']!r} of the arrays, or the group itself, is unknown")
        if row is None or stored["kind"] != "result":
            continue  # arrays of a prefix, of the reference, or of a running evaluation
        found.add(row["group_id"])
        with report.reading(subject, "its arrays"):
            _compare_arrays(of_run, report, subject, row, stored)
    for row in groups.values():
        if row["state"] in STATES_WITH_RESULT and row["group_id"] not in found:
            report.problem(f"group {row['group_id']}", f"the group is {row['state']}, but its arrays are not stored")
    report.facts["payloads"] = len(found)


def _compare_arrays(of_run: RunRows, report: VerifyReport, subject: str, row: sqlite3.Row, stored: sqlite3.Row) -> None:
    texts, arrays = read_checked(of_run.ledger, stored)
    prompt_ids, completions = decode_result(arrays, texts)
    rows = split_rows(CompletionArrays.of(arrays), completions)
    group = Group(row["group_id"], prompt_ids, completions, rows=rows)
    text = "the arrays of the group have the digest {}, but the ledger has {}"
    report.compare(subject, text, group.digest(row["digest"]), row["digest"])
    report.compare(subject, "the group's arrays have {} tokens, but the ledger has {}", group.num_tokens, row["tokens"])
    in_sequences = group.num_sequence_tokens
    text = "the sequences of the group have {} tokens, but the ledger has {}"
    report.compare(subject, text, in_sequences, row["sequence_tokens"])
    report.compare(subject, "the oldest version is {}, but the ledger has {}", group.oldest_step, row["oldest_step"])
    if row["rewards"] is None:
        return
    functions = json.loads(row["functions"])
    expected = group.num_samples * len(functions)
    report.compare(subject, "the group's row has {} rewards, expected {}", len(row["rewards"]) // 4, expected)
    labels = [reward.label for reward in of_run.spec.rewards]
    report.compare(subject, "the rewards are of the functions {}, but the run has {}", functions, labels)


def read_checked(ledger: Ledger, stored: sqlite3.Row) -> tuple[Buffer, Buffer]:
    """Check the header and the arrays of a row of `payloads`, and return them. They are in a segment or, in a backup,
    in the row itself. Raises LedgerFault."""
    content = ledger.payloads.payload(stored).read()
    for part, name in zip(content, ("header", "arrays"), strict=True):
        expected = stored[f"{name}_crc"]
        if stored["segment"] is None and expected is not None and crc32(part) != expected:
            raise LedgerFault(f"the column {name} of the table payloads changed after it was written; restore a backup")
    return content


def _stored(of_run: RunRows, kind: str = "") -> Iterator[sqlite3.Row]:
    """Yield the rows of the table `payloads` one by one, because in a backup they contain the arrays."""
    yield from of_run.ledger.db.execute(f"SELECT * FROM payloads WHERE run_id = ?{kind}", (of_run.run_id,))


def references(of_run: RunRows, report: VerifyReport) -> None:
    """If the pool serves the reference, compare its log-probabilities with the tokens of every scored group."""
    serves, groups = of_run.spec.pool_serves_reference, {g["group_id"]: g for g in of_run.groups}
    found: set[int] = set()
    for stored in _stored(of_run, " AND kind = 'reference'"):
        subject, row = f"group {stored['group_id']}", groups.get(stored["group_id"])
        found.add(stored["group_id"])
        with report.reading(subject, "its reference"):
            logprobs = decode_reference(read_checked(of_run.ledger, stored)[1])
            text = "the log-probabilities of the reference have {} tokens, but the ledger has {}"
            report.compare(subject, text, len(logprobs), row and row["tokens"])
            _compare_scores(report, subject, row, [logprobs])
    for row in of_run.groups:
        subject = f"group {row['group_id']}"
        if serves and row["state"] in ("scored", "batched") and row["group_id"] not in found:
            report.problem(subject, f"the group is {row['state']} without the reference's log-probabilities")
        if not serves:
            with report.reading(subject, "its rewards"):
                _compare_scores(report, subject, row, [])
    if serves:
        report.facts["references"] = len(found)


def _compare_scores(report: VerifyReport, subject: str, row: sqlite3.Row | None, references: list[FloatArray]) -> None:
    if row is None or row["rewards"] is None:
        return
    digest = scores_digest(np.frombuffer(row["rewards"], "<f4"), references)
    text = "rewards and reference of the group have the digest {}, but the ledger has {}"
    report.compare(subject, text, digest, row["scores_digest"])


def _compare_with_batch(
    of_run: RunRows, report: VerifyReport, subject: str, step: int, received: list[sqlite3.Row], whole: bool
) -> None:
    """Check that a session's receipts have each group of the step's batch exactly once, with the group's digests."""
    groups = of_run.of_step.get(step, [])
    digests = {g["group_id"]: g["digest"] for g in groups}
    tokens = {g["group_id"]: g["tokens"] for g in groups}
    scores = {g["group_id"]: g["scores_digest"] for g in groups}
    ids: list[int] = []
    for row in received:
        consumed = list(zip(json.loads(row["group_ids"]), json.loads(row["digests"]), strict=True))
        ids += [group_id for group_id, _ in consumed]
        wrong = [group_id for group_id, digest in consumed if digests.get(group_id) != digest]
        if wrong:
            what = "which the batch lacks or has with other digests"
            report.problem(subject, f"rank {row['rank']} trained groups {wrong[:5]}, {what}")
        scores_digests = json.loads(row["scores_digests"])
        other = [
            group_id
            for (group_id, _), digest in zip(consumed, scores_digests, strict=True)
            if digest != scores.get(group_id)
        ]
        if other:
            report.problem(
                subject, f"rank {row['rank']} trained groups {other[:5]} with rewards that differ from the ledger's"
            )
        counted = sum(tokens.get(group_id, 0) for group_id, _ in consumed)
        text = f"rank {row['rank']} trained {{}} tokens, but the groups of the rank have {{}}"
        report.compare(subject, text, row["tokens"], counted)
    if len(set(ids)) != len(ids):
        report.problem(subject, "two ranks trained the same group")
    if whole:
        missing = sorted(digests.keys() - set(ids))
        report.compare(subject, "groups {} of the batch are in no receipt, expected {}", missing, [])


Life = tuple[int, int, int]
"""Key of a life of a sample: group id, sample and number of the life."""

WAITING = (State.ADMITTED, State.LEASED)
"""States of groups whose turns are kept one by one."""


def episodes(of_run: RunRows, report: VerifyReport) -> None:
    """Check that each turn agrees with its arrays and follows the one before, that an open group without a result has
    the tokens of its turns, and that the lives of a sample are numbered without a gap."""
    turns = of_run.rows("SELECT * FROM episodes WHERE run_id = ? ORDER BY group_id, sample, life, turn")
    ended = of_run.rows("SELECT * FROM restarts WHERE run_id = ? ORDER BY group_id, sample, life")
    if not turns and not ended and not of_run.spec.environment.is_used:
        return
    lives: dict[Life, list[sqlite3.Row]] = {}
    for turn in turns:
        lives.setdefault((turn["group_id"], turn["sample"], turn["life"]), []).append(turn)
        subject = f"turn {turn['turn']} of sample {turn['sample']} of group {turn['group_id']}"
        with report.reading(subject, "its arrays"):
            _compare_turn(of_run, report, subject, turn)
    _check_lives(report, lives, ended)
    for life, of_life in lives.items():
        _order(report, life, of_life)
    _groups_of_turns(of_run, report, turns, ended)
    report.facts |= {"journaled_turns": len(turns), "ended_lives": len(ended)}


def _compare_turn(of_run: RunRows, report: VerifyReport, subject: str, turn: sqlite3.Row) -> None:
    arrays = TurnArrays.decode(read_checked(of_run.ledger, turn)[1])
    digest = turn_digest(arrays.token_ids, arrays.logprobs, arrays.spans)
    report.compare(subject, "the turn's arrays have the digest {}, but the ledger has {}", digest, turn["digest"])
    digest = context_digest(arrays.context_ids)
    text = "the tokens before the turn have the digest {}, but the ledger has {}"
    report.compare(subject, text, digest, turn["context_digest"])
    report.compare(subject, "the arrays have {} tokens, but the ledger has {}", len(arrays.token_ids), turn["tokens"])
    oldest = min(Version(*span[:2]).step for span in arrays.spans)
    report.compare(subject, "the oldest version is {}, but the ledger has {}", oldest, turn["oldest_step"])
    report.compare(subject, "the turn's arrays are of row {}, but the ledger has {}", arrays.row, turn["row_index"])
    left_out = json.loads(turn["left_out"])
    if not set(left_out) <= set(range(turn["turn"] + 1)) or (left_out and not turn["last"]):
        report.problem(subject, f"the turn leaves out turns {left_out[:8]}, which is not allowed")


def _order(report: VerifyReport, life: Life, turns: list[sqlite3.Row]) -> None:
    subject = f"sample {life[1]} of group {life[0]}"
    numbers = [turn["turn"] for turn in turns]
    report.compare(subject, "the sample's turns are {}, expected {}", numbers, list(range(len(turns))))
    if any(turn["last"] for turn in turns[:-1]):
        report.problem(subject, "turns follow the turn that is marked as the last")
    num_rows = 0
    for turn in turns:
        if turn["row_index"] > num_rows:
            report.problem(
                subject, f"turn {turn['turn']} is of row {turn['row_index']}, but only {num_rows} rows precede it"
            )
        num_rows = max(num_rows, turn["row_index"] + 1)
        report.compare(subject, "the turns have {} rows, but the ledger has {}", num_rows, turn["num_rows"])


def _check_lives(report: VerifyReport, lives: dict[Life, list[sqlite3.Row]], ended: list[sqlite3.Row]) -> None:
    """Check that a sample's ended lives are numbered from 1 without a gap, and that its turns are of the next life."""
    last: dict[tuple[int, int], sqlite3.Row] = {}
    for row in ended:
        key = (row["group_id"], row["sample"])
        subject = f"sample {key[1]} of group {key[0]}"
        report.compare(subject, "the sample's ended life is {}, expected {}", row["life"], _next_life(last.get(key)))
        last[key] = row
    for group_id, sample, life in lives:
        before = last.get((group_id, sample))
        subject = f"sample {sample} of group {group_id}"
        report.compare(subject, "the sample's turns are of life {}, expected {}", life, _next_life(before))
        if before is not None and before["given_up"]:
            report.problem(subject, "the sample was given up, but has turns")


def _next_life(before: sqlite3.Row | None) -> int:
    return 1 if before is None else int(before["life"]) + 1


def _groups_of_turns(of_run: RunRows, report: VerifyReport, turns: list[sqlite3.Row], ended: list[sqlite3.Row]) -> None:
    tokens: dict[int, int] = {}
    oldest: dict[int, int] = {}
    for turn in turns:
        group_id = turn["group_id"]
        tokens[group_id] = tokens.get(group_id, 0) + turn["tokens"]
        oldest[group_id] = min(turn["oldest_step"], oldest.get(group_id, turn["oldest_step"]))
    rows = of_run.rows("SELECT group_id, state, tokens, oldest_step FROM groups WHERE run_id = ?")
    group_ids = {row["group_id"] for row in rows}
    for row in rows:
        subject, group_id = f"group {row['group_id']}", row["group_id"]
        if row["state"] not in WAITING:
            if group_id in tokens:
                report.problem(subject, f"the group is {row['state']}, but still has turns in the table episodes")
            continue
        text = "the group has {} tokens, but its turns have {}"
        report.compare(subject, text, row["tokens"], tokens.get(group_id, 0))
        text = "the group's oldest version is {}, but the oldest version of its turns is {}"
        report.compare(subject, text, row["oldest_step"], oldest.get(group_id))
    for table, found in (("episodes", turns), ("restarts", ended)):
        missing = sorted({row["group_id"] for row in found} - group_ids)
        if missing:
            report.problem(
                f"groups {missing[:5]}", f"these groups have rows in the table {table}, but not in the table groups"
            )

"""Comparison of what ranks and workers sent with the ledger's groups and batches: the second half of `verify`.

Ranks sent receipts, rollout workers sent arrays, reward workers sent rewards and the reference's log-probabilities.
None of them reads the ledger's sums, so agreement here means that what was trained is what was generated and scored.
"""

from __future__ import annotations

import json
import sqlite3
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from paceline.array_frames import Buffer
from paceline.errors import LedgerFault
from paceline.groups import FloatArray, Group, scores_digest
from paceline.services.coordinator.ledger.integrity.report import VerifyReport
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.wire import CompletionArrays, decode_reference, decode_result, split_rows

if TYPE_CHECKING:
    from paceline.services.coordinator.audit.record import Record

KINDS = ("result", "prefix", "reference")
STATES_WITH_RESULT = ("generated", "scored", "batched")


def receipts(record: Record, report: VerifyReport) -> None:
    """Compare receipts with batches: every session's receipts fit the batch, every trained step has those of all ranks
    of one session, and no group was trained in two steps. A session that died in a step, or is replaying it, has only
    some.
    """
    rows = record.db.execute(
        "SELECT * FROM receipts WHERE run_id = ? ORDER BY step, session, rank", (record.run_id,)
    ).fetchall()
    lives: dict[tuple[int, int], list[sqlite3.Row]] = {}
    for row in rows:
        lives.setdefault((row["step"], row["session"]), []).append(row)
    step_of: dict[int, int] = {}
    complete: dict[int, int] = {}
    for (step, session), received in lives.items():
        subject = f"step {step}, session {session}"
        with report.reading(subject, "a receipt"):
            if session > record.run["session"]:
                report.problem(subject, "a receipt of a session that has not begun")
            for row in received:
                for group_id in json.loads(row["group_ids"]):
                    if step_of.setdefault(group_id, step) != step:
                        report.problem(
                            subject, f"group {group_id} was trained in step {step_of[group_id]} too"
                        )
            whole = [row["rank"] for row in received] == list(range(received[0]["world_size"]))
            if whole:
                complete[step] = session
            if record.has_batches:
                _compare_with_batch(record, report, subject, step, received, whole)
    for step in range(record.run["next_step"]):
        if step not in complete:
            report.problem(f"step {step}", "it is trained, but no session has a receipt of every rank")
    report.facts |= {"receipts": len(rows), "sessions": sorted(set(complete.values()))}


def payloads(record: Record, report: VerifyReport) -> None:
    """Compare the arrays that are still stored with digest, tokens, age and the rewards' shape on record."""
    measured = record.db.execute(
        "SELECT group_id, state, tokens, sequence_tokens, oldest_step, digest, rewards, functions FROM groups"
        " WHERE run_id = ? AND class != 'train' AND state = 'scored'",
        (record.run_id,),
    ).fetchall()
    groups = {g["group_id"]: g for g in (*record.groups, *measured)}
    group_ids = {
        row[0] for row in record.db.execute("SELECT group_id FROM groups WHERE run_id = ?", (record.run_id,))
    }
    found: set[int] = set()
    for stored in record.db.execute("SELECT * FROM payloads WHERE run_id = ?", (record.run_id,)):
        row, subject = groups.get(stored["group_id"]), f"group {stored['group_id']}"
        if stored["kind"] not in KINDS or stored["group_id"] not in group_ids:
            report.problem(
                subject, f"the kind {stored['kind']!r} of its arrays, or the group itself, is unknown"
            )
        if row is None or stored["kind"] != "result":
            continue  # a prefix, the reference's, or of an evaluation that is under way
        found.add(row["group_id"])
        with report.reading(subject, "its arrays"):
            _compare_arrays(record, report, subject, row, stored)
    for row in groups.values():
        if row["state"] in STATES_WITH_RESULT and row["group_id"] not in found:
            report.problem(f"group {row['group_id']}", f"it is {row['state']}, but its arrays are not stored")
    report.facts["payloads"] = len(found)


def _compare_arrays(
    record: Record, report: VerifyReport, subject: str, row: sqlite3.Row, stored: sqlite3.Row
) -> None:
    texts, arrays = read_checked(record.ledger, stored)
    prompt_ids, completions = decode_result(arrays, texts)
    rows = split_rows(CompletionArrays.of(arrays), completions)
    group = Group(row["group_id"], prompt_ids, completions, rows=rows)
    text = "its arrays give the digest {}, on record is {}"
    report.compare(subject, text, group.digest(row["digest"]), row["digest"])
    report.compare(subject, "it has {} tokens, on record are {}", group.num_tokens, row["tokens"])
    in_sequences = group.num_sequence_tokens
    text = "its sequences have {} tokens, on record are {}"
    report.compare(subject, text, in_sequences, row["sequence_tokens"])
    report.compare(subject, "its oldest version is {}, on record {}", group.oldest_step, row["oldest_step"])
    if row["rewards"] is None:
        return
    functions = json.loads(row["functions"])
    expected = group.num_samples * len(functions)
    report.compare(subject, "it has {} rewards, expected {}", len(row["rewards"]) // 4, expected)
    labels = [reward.label for reward in record.spec.rewards]
    report.compare(subject, "its rewards are of the functions {}, the run has {}", functions, labels)


def read_checked(ledger: Ledger, stored: sqlite3.Row) -> tuple[Buffer, Buffer]:
    """Return header and arrays of a row of the table `payloads`, after a comparison with their checksums wherever they
    are, as in a backup within the row. Raises LedgerFault.
    """
    content = ledger.payloads.payload(stored).read()
    for part, name in zip(content, ("header", "arrays"), strict=True):
        expected = stored[f"{name}_crc"]
        if stored["segment"] is None and expected is not None and crc32(part) != expected:
            raise LedgerFault(
                f"the column {name} of the table payloads is not what was written; restore a backup"
            )
    return content


def references(record: Record, report: VerifyReport) -> None:
    """Compare the reference's log-probabilities, where the pool serves it, with the tokens of every scored group."""
    serves, groups = record.spec.pool_serves_reference, {g["group_id"]: g for g in record.groups}
    found: set[int] = set()
    stored_rows = record.db.execute(
        "SELECT * FROM payloads WHERE run_id = ? AND kind = 'reference'", (record.run_id,)
    )
    for stored in stored_rows:
        subject, row = f"group {stored['group_id']}", groups.get(stored["group_id"])
        found.add(stored["group_id"])
        with report.reading(subject, "its reference"):
            logprobs = decode_reference(read_checked(record.ledger, stored)[1])
            text = "its reference says something of {} tokens, on record are {}"
            report.compare(subject, text, len(logprobs), row and row["tokens"])
            _compare_scores(report, subject, row, [logprobs])
    for row in record.groups:
        subject = f"group {row['group_id']}"
        if serves and row["state"] in ("scored", "batched") and row["group_id"] not in found:
            report.problem(subject, f"it is {row['state']} without the reference's log-probabilities")
        if not serves:
            with report.reading(subject, "its rewards"):
                _compare_scores(report, subject, row, [])
    if serves:
        report.facts["references"] = len(found)


def _compare_scores(
    report: VerifyReport, subject: str, row: sqlite3.Row | None, references: list[FloatArray]
) -> None:
    """Compare rewards and reference of a group with the digest that its batch and its receipts have."""
    if row is None or row["rewards"] is None:
        return
    digest = scores_digest(np.frombuffer(row["rewards"], "<f4"), references)
    text = "its rewards and reference give the digest {}, on record is {}"
    report.compare(subject, text, digest, row["scores_digest"])


def _compare_with_batch(
    record: Record, report: VerifyReport, subject: str, step: int, received: list[sqlite3.Row], whole: bool
) -> None:
    """Compare the receipts of one session with the groups of the step's batch: all of them, each once, by their
    digests.
    """
    groups = record.of_step.get(step, [])
    digests = {g["group_id"]: g["digest"] for g in groups}
    tokens = {g["group_id"]: g["tokens"] for g in groups}
    scores = {g["group_id"]: g["scores_digest"] for g in groups}
    ids: list[int] = []
    for row in received:
        consumed = list(zip(json.loads(row["group_ids"]), json.loads(row["digests"]), strict=True))
        ids += [group_id for group_id, _ in consumed]
        wrong = [group_id for group_id, digest in consumed if digests.get(group_id) != digest]
        if wrong:
            report.problem(subject, f"rank {row['rank']} trained {wrong[:5]}, which the batch has otherwise")
        scores_digests = json.loads(row["scores_digests"])
        other = [
            group_id
            for (group_id, _), digest in zip(consumed, scores_digests, strict=True)
            if digest != scores.get(group_id)
        ]
        if other:
            report.problem(
                subject, f"rank {row['rank']} trained {other[:5]} with other rewards than on record"
            )
        counted = sum(tokens.get(group_id, 0) for group_id, _ in consumed)
        text = f"rank {row['rank']} trained {{}} tokens, its groups have {{}}"
        report.compare(subject, text, row["tokens"], counted)
    if len(set(ids)) != len(ids):
        report.problem(subject, "two ranks trained the same group")
    if whole:
        missing = sorted(digests.keys() - set(ids))
        report.compare(subject, "groups {} of the batch are in no receipt, expected {}", missing, [])

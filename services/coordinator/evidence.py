"""What others left behind of a run, held against the ledger's groups and batches: the second half of `verify`.

Ranks sent receipts, rollout workers sent arrays, the learner wrote checkpoints. None of them reads the ledger's own
sums, so agreement here means that what was trained is what was generated.
"""

from __future__ import annotations

import json
import sqlite3
from typing import TYPE_CHECKING

from paceline.errors import PacelineError
from paceline.groups import Group
from paceline.storage import Folder
from paceline.wire import decode_reference, decode_result
from services.coordinator.ledger import Ledger
from services.coordinator.payloads import read_frame

if TYPE_CHECKING:
    from services.coordinator.verify import Record, VerifyReport

MANIFEST_NAME = "manifest.json"
STATES_WITH_RESULT = ("generated", "scored", "batched")


def receipts(record: Record, report: VerifyReport) -> None:
    """Every session's receipts fit the batch, every trained step has those of all ranks of one session, and no
    group was consumed in two steps. A session that died in a step, or is replaying it, has only some.
    """
    rows = record.db.execute(
        "SELECT * FROM receipts WHERE run_id = ? ORDER BY step, session, rank", (record.run_id,)
    ).fetchall()
    lives: dict[tuple[int, int], list[sqlite3.Row]] = {}
    for row in rows:
        lives.setdefault((row["step"], row["session"]), []).append(row)
    step_of: dict[int, int] = {}
    complete: dict[int, int] = {}
    for (step, session), own in lives.items():
        subject = f"step {step}, session {session}"
        if session > record.run["session"]:
            report.problem(subject, "a receipt of a session that has not begun")
        for row in own:
            for group_id in json.loads(row["group_ids"]):
                if step_of.setdefault(group_id, step) != step:
                    report.problem(subject, f"group {group_id} was trained in step {step_of[group_id]} too")
        whole = [row["rank"] for row in own] == list(range(own[0]["world_size"]))
        if whole:
            complete[step] = session
        if record.has_batches:
            _compare_with_batch(record, report, subject, step, own, whole)
    for step in range(record.run["next_step"]):
        if step not in complete:
            report.problem(f"step {step}", "it is trained, but no session has a receipt of every rank")
    report.facts |= {"receipts": len(rows), "sessions": sorted(set(complete.values()))}


def payloads(record: Record, report: VerifyReport) -> None:
    """The arrays that are still stored give the digest, the tokens, the age and the rewards' shape on record."""
    groups = {g["group_id"]: g for g in record.groups}
    found: set[int] = set()
    for stored in record.db.execute(
        "SELECT * FROM payloads WHERE run_id = ? AND kind = 'result'", (record.run_id,)
    ):
        row, subject = groups.get(stored["group_id"]), f"group {stored['group_id']}"
        if row is None:
            continue  # of an evaluation
        found.add(row["group_id"])
        try:
            texts, arrays = record.ledger.payloads.payload(stored).read()
            prompt_ids, completions = decode_result(arrays, texts)
        except PacelineError as error:
            if _was_pruned(record, row["group_id"]):
                continue
            report.problem(subject, f"its arrays cannot be read: {error}")
            continue
        group = Group(row["group_id"], prompt_ids, completions)
        report.compare(
            subject,
            "its arrays give the digest {}, on record is {}",
            group.digest(row["digest"]),
            row["digest"],
        )
        report.compare(subject, "it has {} tokens, on record are {}", group.num_tokens, row["tokens"])
        report.compare(
            subject, "its oldest version is {}, on record {}", group.oldest_step, row["oldest_step"]
        )
        if row["rewards"] is not None:
            expected = len(completions) * len(json.loads(row["functions"]))
            report.compare(subject, "it has {} rewards, expected {}", len(row["rewards"]) // 4, expected)
    for row in record.groups:
        if row["state"] in STATES_WITH_RESULT and row["group_id"] not in found:
            report.problem(f"group {row['group_id']}", f"it is {row['state']}, but its arrays are not stored")
    report.facts["payloads"] = len(found)


def references(record: Record, report: VerifyReport) -> None:
    """Where the reward pool serves the reference, every scored group has an answer for each of its tokens."""
    if not record.spec.pool_serves_reference:
        return
    tokens = {g["group_id"]: g["tokens"] for g in record.groups}
    found: set[int] = set()
    for stored in record.db.execute(
        "SELECT * FROM payloads WHERE run_id = ? AND kind = 'reference'", (record.run_id,)
    ):
        group_id = stored["group_id"]
        found.add(group_id)
        try:
            logprobs = decode_reference(read_frame(record.ledger.payloads.payload(stored).arrays))
        except PacelineError as error:
            if not _was_pruned(record, group_id):
                report.problem(f"group {group_id}", f"its reference cannot be read: {error}")
            continue
        text = "its reference says something of {} tokens, on record are {}"
        report.compare(f"group {group_id}", text, len(logprobs), tokens.get(group_id))
    for row in record.groups:
        if row["state"] in ("scored", "batched") and row["group_id"] not in found:
            report.problem(
                f"group {row['group_id']}", f"it is {row['state']} without the reference's log-probabilities"
            )
    report.facts["references"] = len(found)


def _was_pruned(record: Record, group_id: int) -> bool:
    """Whether a coordinator that goes on has let go of the group's bulk since the snapshot was taken."""
    now = Ledger(record.ledger.path, read_only=True)
    try:
        return (
            now.db.execute(
                "SELECT 1 FROM payloads WHERE run_id = ? AND group_id = ? AND kind = 'result'",
                (record.run_id, group_id),
            ).fetchone()
            is None
        )
    finally:
        now.close()


def checkpoints(record: Record, report: VerifyReport) -> None:
    """Checkpoints stand where the chain says, and their manifests, where they can be seen, are as registered."""
    chains = {batch["step"] + 1: batch["chain"] for batch in record.batches} | {0: ""}
    rows = record.db.execute(
        "SELECT * FROM checkpoints WHERE run_id = ? ORDER BY step, session", (record.run_id,)
    ).fetchall()
    on_disk = 0
    for row in rows:
        subject = f"checkpoint {row['path']} of step {row['step']}"
        last = record.run["next_batch" if record.has_batches else "next_step"]
        if row["step"] > last:
            report.problem(subject, f"it is ahead of the ledger, which is at step {last}")
        elif record.has_batches:
            chain = chains.get(row["step"])
            report.compare(subject, "its chain is {}, the ledger's {}", row["chain"], chain)
        folder = Folder(record.ledger.known_checkpoint(row).path)
        if row["removed"] or not folder.exists():
            continue
        try:
            digest = folder.sha256(MANIFEST_NAME)
        except FileNotFoundError:
            report.problem(subject, f"it has no {MANIFEST_NAME}")
            continue
        on_disk += 1
        report.compare(subject, "its manifest has the SHA-256 {}, registered is {}", digest, row["sha256"])
    report.facts |= {"checkpoints": len(rows), "manifests_on_disk": on_disk}


def _compare_with_batch(
    record: Record, report: VerifyReport, subject: str, step: int, own: list[sqlite3.Row], whole: bool
) -> None:
    """Receipts of one session name groups of the step's batch by their digests; together all of them, once."""
    groups = record.of_step.get(step, [])
    digests = {g["group_id"]: g["digest"] for g in groups}
    tokens = {g["group_id"]: g["tokens"] for g in groups}
    ids: list[int] = []
    for row in own:
        consumed = list(zip(json.loads(row["group_ids"]), json.loads(row["digests"]), strict=True))
        ids += [group_id for group_id, _ in consumed]
        wrong = [group_id for group_id, digest in consumed if digests.get(group_id) != digest]
        if wrong:
            report.problem(subject, f"rank {row['rank']} trained {wrong[:5]}, which the batch has otherwise")
        counted = sum(tokens.get(group_id, 0) for group_id, _ in consumed)
        text = f"rank {row['rank']} trained {{}} tokens, its groups have {{}}"
        report.compare(subject, text, row["tokens"], counted)
    if len(set(ids)) != len(ids):
        report.problem(subject, "two ranks trained the same group")
    if whole:
        missing = sorted(digests.keys() - set(ids))
        report.compare(subject, "groups {} of the batch are in no receipt, expected {}", missing, [])

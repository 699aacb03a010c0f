"""The judgement of a campaign's run, from records that were written independently of each other."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.ledger.ledger import Ledger

REPLAY_TIMEOUT_S = 600.0


@dataclass
class Verdict:
    """Zero is what was promised."""

    lost: int = 0
    """Groups that were admitted and have no end, or an end that infrastructure must not cause."""
    trained_twice: int = 0
    """Groups beyond the first time along the lineage, by the ranks' own receipts."""
    stalled: int = 0
    """1 when the run did not end well."""
    wrong_weights: int = 0
    """1 when a learner that nobody disturbed reaches other weights from the same batches."""
    problems: list[str] = field(default_factory=list)
    replayed_steps: int = 0
    """Steps that more than one session trained."""
    leased_again: int = 0
    """Groups of those steps that were given out for generating more than once."""
    wasted_tokens: int = 0
    """Generated, and taken by no commit: what a second generation of a group would have been."""


def judge(directory: Path, run_id: str, stalled: str = "") -> Verdict:
    """Judges a run that has ended, or that was given up for the reason `stalled`."""
    verdict = Verdict()
    with contextlib.closing(Ledger(directory / "ledger.sqlite", read_only=True)) as ledger:
        row = ledger.run(run_id)
        if stalled or row["state"] != "succeeded":
            verdict.stalled = 1
            verdict.problems.append(stalled or f"{run_id} {row['state']}: {row['message']}")
        report = verify(ledger, run_id)
        verdict.problems += report.problems
        states = Counter(report.facts["groups"])
        dropped = Counter(report.facts["dropped"])
        ended = states["trained"] + dropped["run_ended"] + dropped["stale"]
        verdict.lost = ledger.counters(run_id).get("groups:ever_admitted", 0) - ended
        trained = _by_receipts(ledger, run_id)
        verdict.trained_twice = sum(trained.values()) - len(trained)
        if set(trained) != _marked_trained(ledger, run_id):
            verdict.problems.append("the groups in the receipts are not those that are marked as trained")
        replayed = ledger.db.execute(
            "SELECT step FROM receipts WHERE run_id = ? GROUP BY step HAVING COUNT(DISTINCT session) > 1",
            (run_id,),
        ).fetchall()
        verdict.replayed_steps = len(replayed)
        verdict.leased_again = ledger.db.execute(
            "SELECT COUNT(*) FROM groups WHERE run_id = ? AND attempt > 1 AND step IN (SELECT value FROM json_each(?))",
            (run_id, json.dumps([row["step"] for row in replayed])),
        ).fetchone()[0]
        verdict.wasted_tokens = ledger.counters(run_id).get("tokens:wasted", 0)
    if not verdict.stalled:
        difference = _replay(directory / run_id)
        if difference:
            verdict.wrong_weights = 1
            verdict.problems.append(difference)
    return verdict


def _by_receipts(ledger: Ledger, run_id: str) -> Counter[int]:
    """Count how often each group was trained along the lineage: the newest session's record of each step."""
    rows = ledger.db.execute(
        "SELECT group_ids FROM receipts r WHERE run_id = ? AND session = (SELECT MAX(session) FROM receipts n"
        " WHERE n.run_id = r.run_id AND n.step = r.step)",
        (run_id,),
    )
    return Counter(group_id for row in rows for group_id in json.loads(row["group_ids"]))


def _marked_trained(ledger: Ledger, run_id: str) -> set[int]:
    rows = ledger.db.execute("SELECT group_id FROM groups WHERE run_id = ? AND state = 'trained'", (run_id,))
    return {row["group_id"] for row in rows}


def _replay(folder: Path) -> str:
    """Trains the whole run again from step 0, alone; what is different then, empty for nothing."""
    program = "from paceline.services.cli.main import main; main()"
    arguments = ["replay", str(folder), "--from", "0", "--device", "cpu", "--json"]
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=REPLAY_TIMEOUT_S, env=os.environ, check=False
    )
    if not done.stdout.startswith("{"):
        return f"the replay failed: {done.stderr.strip()[-500:]}"
    facts = json.loads(done.stdout)
    if facts["identical"] is not True:
        return f"a replay reached other weights: {facts}"
    return ""

"""RecordsService.GetGroupLife: what happened to a group, from the columns and tables that keep it.

RecordsService.ListAttempts: pages of the rewards of scored groups with their prompts.

Groups that were dropped because all their completions were alike are included, so the pages say how hard a prompt is.
"""

from __future__ import annotations

import json
import sqlite3
from typing import TYPE_CHECKING

from paceline.errors import NotFound
from paceline.v1 import records_pb2 as pb

if TYPE_CHECKING:
    from paceline.services.coordinator.ledger.ledger import Ledger
from typing import TYPE_CHECKING

import numpy as np

from paceline.advantages import totals
from paceline.services.coordinator.audit.reading import page_tokens
from paceline.spec import RunSpec

REASONS = {
    "stale": "Its tokens were older than the run allows (async_grpo.max_trajectory_age_steps, hard_max_age).",
    "no_variance": "All its completions had the same reward, and grpo.use_dynamic_sampling leaves such groups out.",
    "reward_failed": "A reward function failed on it as often as grpo.max_score_failures allows.",
    "bad_prompt": "Its prompt could not be encoded, or workers failed on it.",
    "prompt_too_long": "Its prompt left no room for a completion.",
    "invalid_result": "Results for it were refused as often as grpo.max_generation_failures allows.",
    "poison": "Workers crashed while they held it, also when they held it alone.",
    "damaged": "Its stored arrays could not be read, and it could not be generated again.",
    "environment_failed": "Every sample of it was given up after environment.max_failures failures.",
    "by_request": "A person took it out of its batch with `paceline drop`.",
    "run_ended": "The run ended before it was trained.",
}
"""Sentences for reasons of drops."""
MAX_HOLDERS = 100
BATCHED = ("batched", "trained")
SCORED = ("scored", *BATCHED)


def get_group_life(ledger: Ledger, request: pb.GetGroupLifeRequest) -> pb.GetGroupLifeResponse:
    """Return the life of a group. Raises NotFound."""
    ledger.run(request.run_id)
    row = ledger.group_queries.get(request.run_id, min(request.group_id, (1 << 63) - 1))
    if row is None:
        raise NotFound(f"run {request.run_id} has no group {request.group_id}")
    life = pb.GetGroupLifeResponse(
        group_id=row["group_id"],
        state=row["state"],
        slot=row["slot"],
        reason=row["reason"] or "",
        explanation=REASONS.get(row["reason"] or "", ""),
        tokens=row["tokens"],
        digest=row["digest"] or "",
    )
    setattr(life, "class", row["class"])
    _add_hops(ledger, request.run_id, row, life)
    return life


def _add_hops(ledger: Ledger, run_id: str, row: sqlite3.Row, life: pb.GetGroupLifeResponse) -> None:
    add, state = life.hops.add, row["state"]
    add(what="admitted", detail=f"at slot {row['slot']}")
    for attempt, member in enumerate(_names(row["holders"]), 1):
        add(what="leased", member_id=member, attempt=attempt)
    deaths = ledger.db.execute(
        "SELECT member_id FROM deaths WHERE run_id = ? AND group_id = ? LIMIT ?",
        (run_id, row["group_id"], MAX_HOLDERS),
    )
    for (member,) in deaths:
        add(what="crashed", member_id=member, detail="the worker crashed while it held the group")
    if row["digest"]:
        oldest = "" if row["oldest_step"] is None else f"; the oldest version is {row['oldest_step']}"
        add(what="generated", attempt=row["attempt"], detail=f"{row['tokens']} tokens{oldest}")
    scorers = _names(row["scorers"])
    for attempt, member in enumerate(scorers, 1):
        add(what="scoring", member_id=member, attempt=attempt)
    if state in SCORED or row["reward"] is not None:
        reward = "none" if row["reward"] is None else f"{row['reward']:.4g}"
        add(what="scored", member_id=scorers[-1] if scorers else "", detail=f"mean reward {reward}")
    _add_batches(ledger, run_id, row, life)
    if state == "dropped":
        add(what="dropped", detail=row["reason"] or "")


def _add_batches(ledger: Ledger, run_id: str, row: sqlite3.Row, life: pb.GetGroupLifeResponse) -> None:
    """Add the batches that it was in, those that were replaced included, and the sessions that trained it."""
    if row["step"] is None:
        return
    step, group_id = row["step"], row["group_id"]
    replaced = ledger.db.execute(
        "SELECT revision, group_ids, dropped_ids, reason FROM replaced_batches WHERE run_id = ? AND step = ?"
        " ORDER BY revision LIMIT ?",
        (run_id, step, MAX_HOLDERS),
    ).fetchall()
    for batch in replaced:
        if group_id in json.loads(batch["group_ids"]):
            what = "removed" if group_id in json.loads(batch["dropped_ids"]) else "batched"
            life.hops.add(
                what=what, detail=f"step {step}, revision {batch['revision']}, replaced: {batch['reason']}"
            )
    if row["state"] in BATCHED:
        life.hops.add(what="batched", detail=f"step {step}, place {row['rank_order']}")
    receipts = (
        ledger.db.execute(
            "SELECT session, rank, group_ids FROM receipts WHERE run_id = ? AND step = ? ORDER BY session, rank LIMIT ?",
            (run_id, step, 1000),
        ).fetchall()
        if row["state"] == "trained"
        else []
    )
    for receipt in receipts:
        if group_id in json.loads(receipt["group_ids"]):
            life.hops.add(
                what="trained",
                detail=f"step {step}, by rank {receipt['rank']} of session {receipt['session']}",
            )


def _names(lines: str) -> list[str]:
    return [line for line in lines.splitlines() if line][:MAX_HOLDERS]


GROUPS = 1000
"""Groups of a page."""
MAX_CHARACTERS = 4 << 20
"""Characters of the prompts of a page; the group that exceeds them is the last one."""


def list_attempts(ledger: Ledger, request: pb.ListAttemptsRequest, spec: RunSpec) -> pb.ListAttemptsResponse:
    """Return a page of scored training groups of a run with this spec. Raises InvalidInput."""
    (after,) = page_tokens.read(request.page_token, 1) or (-1,)
    size = page_tokens.page_size(request.page_size, GROUPS)
    rows = ledger.db.execute(
        "SELECT g.group_id, p.prompt_json, g.rewards, g.step FROM groups g JOIN prompts p USING (run_id, group_id)"
        " WHERE g.run_id = ? AND g.group_id > ? AND g.class = 'train' AND g.rewards IS NOT NULL AND g.rewards != ''"
        " ORDER BY g.group_id LIMIT ?",
        (request.run_id, after, size + 1),
    )
    response, characters = pb.ListAttemptsResponse(), 0
    for group_id, prompt_json, rewards, step in rows:
        if len(response.attempts) == size or characters > MAX_CHARACTERS:
            response.next_page_token = page_tokens.write(response.attempts[-1].group_id)
            break
        rewards_CF = np.frombuffer(rewards, "<f4").reshape(-1, len(spec.rewards))
        response.attempts.add(
            group_id=group_id,
            prompt_json=prompt_json,
            rewards=totals(rewards_CF, spec.rewards, step or 0).tolist(),
        )
        characters += len(prompt_json)
    return response

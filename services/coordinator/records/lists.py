"""Answers about runs, specs, token accounting, batches, checkpoints and groups, from the ledger's rows. The attempts
contain groups that were dropped because all their completions were alike, so that they show how hard a prompt is. Runs
are listed without parsing YAML. A run whose row cannot be read gets a message that says so, and does not hide the
other runs."""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import yaml

from paceline.advantages import totals
from paceline.errors import InvalidInput, NotFound
from paceline.rate_limited_log import RateLimitedLog
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.records import page_tokens
from paceline.spec import RunSpec
from paceline.spec.keys import dotted, keys
from paceline.spec.reading import spec_to_yaml
from paceline.v1 import records_pb2 as pb
from paceline.v1 import run_pb2

BATCHES = 1000
CHECKPOINTS = 1000


def get_books(ledger: Ledger, request: pb.GetBooksRequest) -> pb.GetBooksResponse:
    """Return the token accounting of a run. Raises NotFound."""
    ledger.run(request.run_id)
    books = ledger.token_books(request.run_id)
    reasons = {name.removeprefix("dropped:"): tokens for name, tokens in books.items() if name.startswith("dropped:")}
    return pb.GetBooksResponse(
        **{name: books[name] for name in ("generated", "trained", "dropped", "live", "wasted")},
        dropped_by_reason=reasons,
        groups=ledger.groups_by_state(request.run_id),
        failures=ledger.failures(request.run_id),
        balanced=books["generated"] == books["trained"] + books["dropped"] + books["live"],
    )


def list_batches(ledger: Ledger, request: pb.ListBatchesRequest) -> pb.ListBatchesResponse:
    """Return a page of batches. Raises NotFound, InvalidInput."""
    ledger.run(request.run_id)
    size, key = page_tokens.page_size(request.page_size, BATCHES), page_tokens.read(request.page_token, 1)
    if request.newest_first:
        bound, order = (key[0] if key else page_tokens.LARGEST), "step < ? ORDER BY step DESC"
    else:
        bound = key[0] if key else min(request.from_step, page_tokens.LARGEST) - 1
        order = "step > ? ORDER BY step"
    rows = ledger.rows(
        "SELECT step, digest, chain, trained, revision, (SELECT COUNT(*) FROM groups INDEXED BY step_groups"
        " WHERE groups.run_id = batches.run_id AND groups.step = batches.step AND groups.step IS NOT NULL) AS num_groups"
        f" FROM batches WHERE run_id = ? AND {order} LIMIT ?",
        (request.run_id, bound, size + 1),
    )
    response = pb.ListBatchesResponse()
    for row in rows[:size]:
        response.batches.add(**dict(row))
    if len(rows) > size:
        response.next_page_token = page_tokens.write(rows[size - 1]["step"])
    return response


def list_checkpoints(ledger: Ledger, request: pb.ListCheckpointsRequest) -> pb.ListCheckpointsResponse:
    """Return the checkpoints of a run. Raises NotFound."""
    response = pb.ListCheckpointsResponse(export_path=ledger.export_path(request.run_id))
    for checkpoint in ledger.checkpoints.kept(request.run_id)[-CHECKPOINTS:]:
        response.checkpoints.add(**checkpoint._asdict())
    return response


Location = tuple[str | int, ...]


def get_spec(spec: RunSpec) -> pb.GetSpecResponse:
    response, known_keys = pb.GetSpecResponse(spec_yaml=spec_to_yaml(spec)), keys()
    for location, value in values(spec):
        key = known_keys.get(dotted(location))
        default = key.default_text if key is not None else ""
        response.keys.add(
            path=".".join(map(str, location)),
            value_json=json.dumps(value),
            default=default,
            differs=not _is_default(value, default),
            description=key.description if key is not None else "",
            type=key.type_text if key is not None else "",
        )
    return response


def compare_specs(spec: RunSpec, other: RunSpec) -> pb.CompareSpecsResponse:
    ours, theirs = dict(values(spec)), dict(values(other))
    response = pb.CompareSpecsResponse()
    for location in dict.fromkeys([*ours, *theirs]):
        if location in ours and location in theirs and ours[location] == theirs[location]:
            continue
        response.differences.add(
            path=".".join(map(str, location)),
            value_json=json.dumps(ours[location]) if location in ours else "",
            other_json=json.dumps(theirs[location]) if location in theirs else "",
        )
    return response


def values(spec: RunSpec) -> Iterator[tuple[Location, Any]]:
    """Yield every value of a spec with its location: the keys of sections one by one, any other value as a whole."""
    yield from _below(spec.model_dump(mode="json"), ())


def _below(tree: Any, location: Location) -> Iterator[tuple[Location, Any]]:
    key = keys().get(dotted(location)) if location else None
    is_section = not location or isinstance(location[-1], int) or (key is not None and key.section is not None)
    if isinstance(tree, dict) and is_section:
        for name, value in tree.items():
            yield from _below(value, (*location, name))
    elif isinstance(tree, list) and key is not None and key.section is not None:
        for index, value in enumerate(tree):
            yield from _below(value, (*location, index))
    else:
        yield location, tree


def _is_default(value: Any, default: str) -> bool:
    if default == "required":
        return False
    try:
        return bool(yaml.safe_load(default) == value)
    except yaml.YAMLError:
        return False


REASONS = {
    "stale": "The group's tokens were older than the run allows (async_grpo.max_trajectory_age_steps, hard_max_age).",
    "no_variance": "The group's completions had the same reward, and grpo.use_dynamic_sampling leaves such groups out.",
    "reward_failed": "A reward function failed on the group as often as grpo.max_score_failures allows.",
    "bad_prompt": "The group's prompt could not be encoded, or workers failed on the group.",
    "prompt_too_long": "The group's prompt left no room for a completion.",
    "invalid_result": "Results for the group were refused as often as grpo.max_generation_failures allows.",
    "poison": "Workers crashed while they held the group, also when it was leased alone.",
    "damaged": "The group's stored arrays could not be read, and it could not be generated again.",
    "environment_failed": "Every sample of the group was given up after environment.max_failures failures.",
    "wrong_weights": "The worker that sampled the group was named by the spot check, and `logger.verify_drops` is set.",
    "by_request": "A person took the group out of its batch with `paceline drop`.",
    "run_ended": "The run ended before the group was trained.",
}
"""Explanations of drops. The key is the drop reason."""
MAX_HOLDERS = 100
BATCHED = ("batched", "trained")
SCORED = ("scored", *BATCHED)


def get_group_life(ledger: Ledger, request: pb.GetGroupLifeRequest) -> pb.GetGroupLifeResponse:
    """Return the history of a group. Raises NotFound."""
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
        "SELECT member_id FROM deaths WHERE run_id = ? AND group_id = ? LIMIT ?", (run_id, row["group_id"], MAX_HOLDERS)
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
    if row["step"] is None:
        return
    step, group_id = row["step"], row["group_id"]
    replaced = ledger.rows(
        "SELECT revision, group_ids, dropped_ids, reason FROM replaced_batches WHERE run_id = ? AND step = ?"
        " ORDER BY revision LIMIT ?",
        (run_id, step, MAX_HOLDERS),
    )
    for batch in replaced:
        if group_id in json.loads(batch["group_ids"]):
            what = "removed" if group_id in json.loads(batch["dropped_ids"]) else "batched"
            life.hops.add(what=what, detail=f"step {step}, revision {batch['revision']}, replaced: {batch['reason']}")
    if row["state"] in BATCHED:
        life.hops.add(what="batched", detail=f"step {step}, position {row['rank_order']}")
    receipts = (
        ledger.rows(
            "SELECT session, rank, group_ids FROM receipts WHERE run_id = ? AND step = ? ORDER BY session, rank LIMIT ?",
            (run_id, step, 1000),
        )
        if row["state"] == "trained"
        else []
    )
    for receipt in receipts:
        if group_id in json.loads(receipt["group_ids"]):
            life.hops.add(
                what="trained", detail=f"step {step}, by rank {receipt['rank']} of session {receipt['session']}"
            )


def _names(lines: str) -> list[str]:
    return [line for line in lines.splitlines() if line][:MAX_HOLDERS]


GROUPS = 1000
"""Largest number of groups of a page."""
MAX_CHARACTERS = 4 << 20
"""Number of characters of the prompts of a page. The group that exceeds it is the last one of the page."""


def list_attempts(
    ledger: Ledger, request: pb.ListAttemptsRequest, spec: RunSpec, max_characters: int = MAX_CHARACTERS
) -> pb.ListAttemptsResponse:
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
        if len(response.attempts) == size or characters > max_characters:
            response.next_page_token = page_tokens.write(response.attempts[-1].group_id)
            break
        rewards_CF = np.frombuffer(rewards, "<f4").reshape(-1, len(spec.rewards))
        response.attempts.add(
            group_id=group_id, prompt_json=prompt_json, rewards=totals(rewards_CF, spec.rewards, step or 0).tolist()
        )
        characters += len(prompt_json)
    return response


PAGE_SIZE = 100
seldom = RateLimitedLog(logging.getLogger(__name__))


def run_message(ledger: Ledger, row: sqlite3.Row, queue: Sequence[str] | None = None) -> run_pb2.Run:
    """Return the message of a run's row, with its token accounting; `queue` has the queued runs' ids in order."""
    run_id = row["run_id"]
    if queue is None:
        queue = [waiting["run_id"] for waiting in ledger.queue()]
    return run_pb2.Run(
        run_id=run_id,
        state=run_pb2.RunState.Value(f"RUN_STATE_{row['state'].upper()}"),
        message=row["message"],
        step=row["next_step"],
        max_num_steps=row["max_num_steps"],
        directory=str(ledger.run_directory(run_id)),
        groups=ledger.groups_by_state(run_id),
        tokens=ledger.token_books(run_id),
        age_s=max(0.0, time.time() - row["submitted_s"]),
        warnings=json.loads(row["warnings_json"]),
        priority=ledger.priority(run_id),
        queue_place=queue.index(run_id) + 1 if run_id in queue else 0,
    )


def page(ledger: Ledger, request: run_pb2.ListRequest) -> run_pb2.ListResponse:
    """Return a page of runs, oldest first. Raises InvalidInput for an invalid page token."""
    if not request.page_token.isascii() or not (request.page_token or "0").isdigit():
        raise InvalidInput(
            f"page_token {request.page_token[:40]!r} is invalid; send `next_page_token` of the previous answer"
        )
    after = min(int((request.page_token or "0")[:19]), 1 << 62)
    size = min(request.page_size or PAGE_SIZE, PAGE_SIZE)
    rows = ledger.runs_after(after, size + 1)
    queue = [waiting["run_id"] for waiting in ledger.queue()]
    response = run_pb2.ListResponse(runs=[_tolerant_message(ledger, row, queue) for row in rows[:size]])
    if len(rows) > size:
        response.next_page_token = str(rows[size - 1]["sequence"])
    return response


def _tolerant_message(ledger: Ledger, row: sqlite3.Row, queue: Sequence[str]) -> run_pb2.Run:
    try:
        return run_message(ledger, row, queue)
    except Exception as error:  # a damaged row may raise anything, and concerns only this run
        run_id = str(row["run_id"])
        seldom.warning(run_id, "the row of run %s cannot be read", run_id, error=error)
        return run_pb2.Run(
            run_id=run_id,
            message=f"the run's row cannot be read ({type(error).__name__}); see `paceline ledger verify`",
        )

"""Leases out, generated groups in: from admitted to generated."""

from __future__ import annotations

import hashlib
import json
import sqlite3

from paceline.groups import Group, Version
from paceline.tracing import group_traceparent, span
from paceline.wire import decode_completions, parse_message
from protos.paceline.v1 import common_pb2
from protos.paceline.v1 import exchange_pb2 as pb
from services.coordinator import evaluation, poison
from services.coordinator.admission import admissible, lease_step, may_lease
from services.coordinator.exchange import ActiveRun, Exchange, Outcome
from services.coordinator.intake import Arrived
from services.coordinator.payloads import Frame, read_frame

ADMITTED_AT_ONCE = 64
"""Groups that one request for leases admits beyond those that it gets: a whole step's would keep the others waiting."""


def give(exchange: Exchange, run: ActiveRun, request: pb.ExchangeRequest) -> Outcome:
    """Leases for the room that a rollout worker has: evaluation first, then training, oldest place first."""
    reply = exchange.reply(request, pb.REPLY_STATUS_OK)
    reply.lease.SetInParent()
    if request.lease.HasField("held"):
        _release_lost(exchange, run, request)
        _take_up_again(exchange, run, request)
    payloads: list[Frame] = []
    version = exchange.versions.get(request.member_id)
    if version is None or run.prompts is None:
        return Outcome(reply, empty=True)
    room = request.lease.room
    measured = evaluation.to_lease(
        exchange, run, request.member_id, version, room + poison.num_reserved(exchange)
    )
    for row in poison.choose(exchange, run, request.member_id, measured, room):
        _lease(exchange, run, request.member_id, row, version, reply, payloads, pinned=version)
        room -= 1
    if not exchange.paused(run):
        group_size = run.spec.grpo.num_generations_per_prompt
        places = max(room // group_size, 1 if room > 0 and not reply.lease.leases else 0)
        admit(exchange, run, max(places, ADMITTED_AT_ONCE))
        leasable = _leasable(exchange, run, version, places + poison.num_reserved(exchange))
        steps = {row["group_id"]: step for row, step in leasable}
        rows = [row for row, _ in leasable]
        for row in poison.choose(exchange, run, request.member_id, rows, places):
            step = steps[row["group_id"]]
            _lease(exchange, run, request.member_id, row, version, reply, payloads, step=step)
    return Outcome(reply, payloads, empty=not reply.lease.leases)


def admit(exchange: Exchange, run: ActiveRun, at_most: int) -> None:
    """Admits prompts in the seeded order for as long as the admission rule allows, `at_most` so many; the next request goes
    on from there.
    """
    ledger, run_id = exchange.ledger, run.run_id
    counters = ledger.counters(run_id)
    admitted = counters.get("groups:ever_admitted", 0)
    dropped = sum(n for name, n in counters.items() if name.startswith("groups:dropped:"))
    open_groups = admitted - dropped - counters.get("groups:trained", 0)
    number = admissible(
        open_groups, admitted, dropped, batch=run.batch, max_age=run.max_age, max_steps=run.spec.max_num_steps
    )
    number = min(number, at_most)
    if number == 0 or exchange.admission_closed:
        return
    assert run.prompts is not None
    row = ledger.run(run_id)
    cursor, next_slot = row["cursor"], row["next_slot"]
    freed = exchange.db.execute(
        "SELECT slot FROM free_slots WHERE run_id = ? ORDER BY slot LIMIT ?", (run_id, number)
    ).fetchall()
    free_slots = [row["slot"] for row in reversed(freed)]
    for group_id in range(admitted, admitted + number):
        prompt, columns = run.prompts.draw(cursor)
        cursor += 1
        if free_slots:
            slot = free_slots.pop()
            exchange.places_changed()
            exchange.db.execute("DELETE FROM free_slots WHERE run_id = ? AND slot = ?", (run_id, slot))
        else:
            slot, next_slot = next_slot, next_slot + 1
        insert_group(exchange, run, group_id, "train", slot, prompt, columns)
    ledger.count(run_id, "groups:ever_admitted", number)
    ledger.update_run(run_id, cursor=cursor, next_slot=next_slot)


def insert_group(
    exchange: Exchange, run: ActiveRun, group_id: int, kind: str, slot: int, prompt: object, columns: object
) -> None:
    """A new group, admitted."""
    exchange.db.execute(
        "INSERT INTO groups (run_id, group_id, class, state, slot, prompt_json, columns_json)"
        " VALUES (?, ?, ?, 'admitted', ?, ?, ?)",
        (run.run_id, group_id, kind, slot, json.dumps(prompt), json.dumps(columns, default=str)),
    )


def _release_lost(exchange: Exchange, run: ActiveRun, request: pb.ExchangeRequest) -> None:
    """Takes back leases that the worker does not know of: the reply that gave them out was lost on its way."""
    exchange.db.execute(
        "UPDATE groups SET state = 'admitted', member_id = NULL WHERE run_id = ? AND member_id = ?"
        " AND state = 'leased' AND group_id NOT IN (SELECT value FROM json_each(?))",
        (run.run_id, request.member_id, json.dumps(list(request.lease.held.group_ids))),
    )


def _take_up_again(exchange: Exchange, run: ActiveRun, request: pb.ExchangeRequest) -> None:
    """Leases that were taken back while the worker was not heard of, and that nobody else got: it still works on them."""
    exchange.db.execute(
        "UPDATE groups SET state = 'leased', member_id = ? WHERE run_id = ? AND state = 'admitted' AND attempt > 0"
        " AND group_id IN (SELECT value FROM json_each(?))",
        (request.member_id, run.run_id, json.dumps(list(request.lease.held.group_ids))),
    )


def _leasable(
    exchange: Exchange, run: ActiveRun, version: Version, places: int
) -> list[tuple[sqlite3.Row, int]]:
    """Up to `places` admitted groups with the step each is for, as far as the worker's version allows.

    in_order: the place decides the step. ready_first: the number of groups ahead that are in no batch yet.
    """
    if places <= 0:
        return []
    rows = exchange.db.execute(
        "SELECT * FROM groups INDEXED BY groups_by_state WHERE run_id = ? AND class = 'train' AND state = 'admitted'"
        " ORDER BY slot, group_id LIMIT ?",
        (run.run_id, places),
    ).fetchall()
    next_batch = exchange.ledger.run(run.run_id)["next_batch"]
    leasable = []
    for row in rows:
        if run.spec.async_grpo.order == "in_order":
            step = row["slot"] // run.batch
        else:
            step = lease_step(next_batch, exchange.num_ahead(run, row["slot"]), run.batch)
        if not may_lease(version.step, step, run.max_age):
            break
        leasable.append((row, step))
    return leasable


def _lease(
    exchange: Exchange,
    run: ActiveRun,
    member_id: str,
    row: sqlite3.Row,
    version: Version,
    reply: pb.ExchangeReply,
    payloads: list[Frame],
    *,
    step: int = 0,
    pinned: Version | None = None,
) -> None:
    generation, group_id = run.spec.policy.generation, row["group_id"]
    lease = reply.lease.leases.add(
        group_id=group_id,
        attempt=row["attempt"] + 1,
        prompt_json=row["prompt_json"],
        seed=group_seed(run, group_id),
        num_generations=1 if pinned else run.spec.grpo.num_generations_per_prompt,
        params=common_pb2.SamplingParams(
            max_new_tokens=generation.max_new_tokens,
            min_new_tokens=generation.min_new_tokens,
            temperature=generation.temperature,
            top_p=generation.top_p,
            top_k=generation.top_k,
            stop_token_ids=generation.stop_token_ids,
        ),
        step=step,
        traceparent=group_traceparent(run.run_id, group_id),
    )
    oldest = version.step
    if pinned:
        lease.pinned_version.session, lease.pinned_version.step = pinned
    with span("lease", lease.traceparent, group_id=group_id, attempt=lease.attempt, member_id=member_id):
        pass  # a moment, not a while: it marks when and to whom the group was given
    prefix = exchange.ledger.payload(run.run_id, group_id, "prefix") if row["attempt"] else None
    if prefix is not None:
        payloads.append(prefix.arrays)
        lease.prefix_frame = len(payloads)
        returned = parse_message(pb.LeaseReturn, read_frame(prefix.header))
        lease.prefix_finish_reasons.extend(returned.finish_reasons)
        oldest = min(oldest, row["oldest_step"])
    exchange.set_group(
        run, group_id, state="leased", member_id=member_id, attempt=lease.attempt, lease_step=oldest
    )


def group_seed(run: ActiveRun, group_id: int) -> int:
    """Seed of a group, of 63 bits: a function of the run's name in the ledger, its seed, and the group."""
    text = f"{run.spec.seed}/{group_id}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def take_result(exchange: Exchange, run: ActiveRun, arrived: Arrived) -> Outcome:
    """A generated group that has been checked and stored. The first valid result of any attempt wins while the group waits
    for one.
    """
    request, group = arrived.request, arrived.group
    result = request.group
    row = exchange.group(run, result.group_id)
    if row is None:
        return exchange.stale(request, f"no group {result.group_id} in run {run.run_id}")
    if group is None or arrived.place is None:
        return exchange.refuse(request, arrived.fault)
    if row["state"] not in ("admitted", "leased"):
        if result.digest != row["digest"]:  # else it is the winner, sent again
            exchange.ledger.count(run.run_id, "tokens:wasted", group.num_tokens)
        return exchange.duplicate(request, f"group {result.group_id} is {row['state']} already")
    if not 1 <= result.attempt <= row["attempt"]:
        return exchange.stale(
            request, f"attempt {result.attempt} of group {result.group_id} was never leased"
        )
    expected = run.spec.grpo.num_generations_per_prompt if row["class"] == "train" else 1
    if len(group.completions) != expected:
        return exchange.refuse(
            request, f"group {result.group_id} has {len(group.completions)} completions, not {expected}"
        )
    if row["class"] == "train":
        exchange.ledger.count(run.run_id, "tokens:generated", group.num_tokens)
    elif not evaluation.is_pinned(exchange, run, row, group):
        exchange.set_group(run, result.group_id, state="admitted", member_id=None)
        return exchange.stale(request, "tokens of another version than the evaluation's")
    if row["attempt"] > 1:  # what an earlier one handed back
        exchange.ledger.remove_payloads(run.run_id, result.group_id)
    exchange.db.execute(
        "INSERT INTO payloads VALUES (?, ?, 'result', x'', x'', ?, ?, ?, ?, ?, ?)",
        (run.run_id, result.group_id, *arrived.place),
    )
    poison.clear(exchange, run, result.group_id)
    exchange.set_group(
        run,
        result.group_id,
        state="generated",
        member_id=None,
        tokens=group.num_tokens,
        sequence_tokens=group.num_tokens + len(group.completions) * len(group.prompt_ids),
        oldest_step=group.oldest_step,
        digest=result.digest,
    )
    return exchange.committed(request)


def take_back(exchange: Exchange, run: ActiveRun, arrived: Arrived) -> Outcome:
    """A lease handed back: by a worker that drains, perhaps with unfinished samples, or because of a bad prompt."""
    request, frames = arrived.request, arrived.frames
    returned = request.lease_return
    row = exchange.group(run, returned.group_id)
    if row is None or row["state"] != "leased" or row["attempt"] != returned.attempt:
        return exchange.stale(
            request, f"attempt {returned.attempt} of group {returned.group_id} is not leased"
        )
    if returned.data_error:
        return _failed(exchange, run, request, row)
    if frames and row["class"] == "train":
        prompt_ids, completions = decode_completions(frames[0], returned.finish_reasons, returned.texts)
        expected = run.spec.grpo.num_generations_per_prompt
        if len(frames) != 1 or len(completions) != expected:
            return exchange.refuse(
                request,
                f"group {returned.group_id} came back with {len(completions)} samples, not {expected}",
            )
        exchange.db.execute(
            "INSERT OR REPLACE INTO payloads (run_id, group_id, kind, header, arrays) VALUES (?, ?, 'prefix', ?, ?)",
            (run.run_id, returned.group_id, returned.SerializeToString(), frames[0]),
        )
        oldest = Group(returned.group_id, prompt_ids, completions).oldest_step
        exchange.set_group(run, returned.group_id, oldest_step=oldest if oldest >= 0 else row["lease_step"])
    exchange.set_group(run, returned.group_id, state="admitted", member_id=None)
    return exchange.committed(request)


def _failed(exchange: Exchange, run: ActiveRun, request: pb.ExchangeRequest, row: sqlite3.Row) -> Outcome:
    """An attempt that failed by the fault of the group's data; others may still succeed, up to the budget."""
    returned, allowed = request.lease_return, run.spec.grpo.max_generation_failures
    failures, reason = row["generation_failures"] + 1, returned.data_error_reason or "bad_prompt"
    exchange.set_group(run, row["group_id"], state="admitted", member_id=None, generation_failures=failures)
    exchange.ledger.count(run.run_id, f"failures:{reason}")
    exchange.notice(
        "warning",
        message=f"generating group {row['group_id']} failed ({failures} of {allowed}): {returned.data_error}",
    )
    if failures >= allowed:
        exchange.drop(run, row, reason)
        if row["class"] != "train":
            evaluation.finish_if_done(exchange, run, row["class"])
    return exchange.committed(request)


def lend_again(exchange: Exchange, member_ids: list[str], *, with_leases: bool) -> int:
    """Takes back what silent workers hold, though they may be back: score tasks and, if wished, leases. Whichever attempt's
    result comes first wins. Returns how many groups.
    """
    silent = json.dumps(member_ids)
    number = exchange.db.execute(
        "UPDATE groups SET scorer_id = NULL WHERE state = 'generated' AND scorer_id IN (SELECT value FROM json_each(?))",
        (silent,),
    ).rowcount
    if with_leases:
        number += exchange.db.execute(
            "UPDATE groups SET state = 'admitted', member_id = NULL WHERE state = 'leased'"
            " AND member_id IN (SELECT value FROM json_each(?))",
            (silent,),
        ).rowcount
    return number


def release_member(exchange: Exchange, member_id: str, *, crashed: bool = False) -> int:
    """Takes back every lease and task of a member that is gone; returns how many leases."""
    if crashed and exchange.active is not None:
        poison.on_crash(exchange, exchange.active, member_id)
    exchange.reserved = {group: holder for group, holder in exchange.reserved.items() if holder != member_id}
    exchange.versions.pop(member_id, None)
    exchange.members.discard(member_id)
    exchange.suspected.discard(member_id)
    released = exchange.db.execute(
        "UPDATE groups SET state = 'admitted', member_id = NULL WHERE member_id = ? AND state = 'leased'",
        (member_id,),
    ).rowcount
    exchange.db.execute(
        "UPDATE groups SET scorer_id = NULL WHERE scorer_id = ? AND state = 'generated'", (member_id,)
    )
    return released

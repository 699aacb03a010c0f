"""Leases: from admitted to leased, and back where a worker is gone. submissions.py handles the results."""

from __future__ import annotations

import hashlib
import itertools
import json
import sqlite3
from collections.abc import Sequence

from paceline.data.messages import tools_of_prompt
from paceline.data.prompts import PromptSource
from paceline.errors import Unreadable
from paceline.groups import Version, held_attempt, with_holder
from paceline.services.coordinator.exchange import evaluation, journals, quarantine
from paceline.services.coordinator.exchange.admission import admissible, step_of_group
from paceline.services.coordinator.exchange.batches import damaged_groups
from paceline.services.coordinator.exchange.engines import reach_of, serving
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange, Outcome
from paceline.services.coordinator.ledger.groups import NewLease
from paceline.services.coordinator.ledger.segments import (
    DamagedRecord,
    Frame,
    Payload,
    UnopenedSegment,
    read_frame,
)
from paceline.spec import GenerationSection
from paceline.tracing import group_traceparent, span
from paceline.v1 import common_pb2
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import parse_message

MAX_ROOM = 1 << 16
"""Most completions in one answer, whatever room a worker states."""

MAX_JOURNAL_BYTES = 32 << 20
"""Size of the journals in the answers of one call, unless an answer has only one lease."""

ADMITTED_AT_ONCE = 64
"""Groups that are admitted at a time, or as many as are requested if that is more, where the rule allows them. A whole
step's groups at once would hold up other requests."""


def lease_groups(exchange: Exchange, run: ActiveRun, requests: Sequence[pb.ExchangeRequest]) -> list[Outcome]:
    """Answer requests for leases of different workers, each up to its room: evaluation first, then training, lowest
    slot first. Data that the requests share is read once and written once.
    """
    _reconcile_held(exchange, run, [request for request in requests if request.lease.HasField("held")])
    free: list[tuple[sqlite3.Row, int]] = []
    if run.prompts is not None and not exchange.takes_no_work(run):
        group_size = run.spec.grpo.num_generations_per_prompt
        num_groups = sum(max(1, min(request.lease.room, MAX_ROOM) // group_size) for request in requests)
        free = _admit_and_list_free(exchange, run, num_groups + quarantine.num_reserved(exchange))
    leases = _NewLeases(exchange, run, free)
    outcomes = [leases.answer(request) for request in requests]
    leases.write()
    return outcomes


class _NewLeases:
    """The leases of one call: one worker after the other gets free groups, and all leases are written together."""

    def __init__(self, exchange: Exchange, run: ActiveRun, free: list[tuple[sqlite3.Row, int]]):
        self._exchange, self._run = exchange, run
        self._group_size = run.group_size("train")
        self._val_size = run.spec.grpo.val_samples_per_prompt
        self._params = params_message(run.spec.policy.generation)
        self._engines = serving(exchange, run) if run.spec.environment.is_used else []
        self._free = free
        """Free groups to train, in the order of their slots, each with the step that it is for."""
        self._journal_bytes = 0
        """Size of the journals in the replies."""
        self._unwritten: list[NewLease] = []
        """Leases that are not in the ledger yet."""

    def answer(self, request: pb.ExchangeRequest) -> Outcome:
        """Return the answer to one worker; `write` records its leases."""
        exchange, run = self._exchange, self._run
        reply = exchange.reply(request, pb.REPLY_STATUS_OK)
        reply.lease.SetInParent()
        member_id = request.member_id
        reach = reach_of(exchange, run, member_id, self._engines)
        if reach is None or run.prompts is None or member_id in exchange.overdue:
            return Outcome(reply, empty=True)
        if quarantine.quarantined_groups(exchange, run):
            self.write()  # `choose` reads the groups that each worker holds
        payloads: list[Frame] = []
        room, reserved = min(request.lease.room, MAX_ROOM), quarantine.num_reserved(exchange)
        num_measured = max(room // self._val_size, 1 if room > 0 else 0)
        if engine := self._engine_of_evaluation(member_id):
            pinned_id, version = engine
            measured = evaluation.to_lease(exchange, run, pinned_id, version, num_measured + reserved)
            for row in quarantine.choose(exchange, run, member_id, measured, num_measured):
                added = self._add(member_id, row, version.step, reply, payloads, pinned=engine)
                room -= self._val_size * added
        if quarantine.quarantined_groups(exchange, run):
            self.write()
        num_groups = max(room // self._group_size, 1 if room > 0 and not reply.lease.leases else 0)
        wanted = num_groups + reserved if num_groups else 0
        leasable = list(
            itertools.takewhile(lambda pair: reach.may_lease(pair[1], run.max_age), self._free[:wanted])
        )
        steps = {row["group_id"]: step for row, step in leasable}
        free = [row for row, _ in leasable]
        for row in quarantine.choose(exchange, run, member_id, free, num_groups):
            step = steps[row["group_id"]]
            if self._add(member_id, row, reach.oldest(step, run.max_age), reply, payloads, step=step):
                self._free.remove((row, step))
        return Outcome(reply, payloads, empty=not reply.lease.leases)

    def write(self) -> None:
        """Record the leases since the last call."""
        if self._unwritten:
            self._exchange.groups.lease(self._unwritten)
            self._unwritten.clear()

    def _engine_of_evaluation(self, member_id: str) -> tuple[str, Version] | None:
        """Return the rollout worker that makes the next evaluation for this worker, with its version."""
        exchange, run = self._exchange, self._run
        if not run.spec.environment.is_used:
            return member_id, exchange.versions[member_id]
        engine = evaluation.choose_engine(exchange, run, self._engines)
        return None if engine is None else (engine.member_id, engine.version)

    def _add(
        self,
        member_id: str,
        row: sqlite3.Row,
        oldest: int,
        reply: pb.ExchangeReply,
        payloads: list[Frame],
        *,
        step: int = 0,
        pinned: tuple[str, Version] | None = None,
    ) -> bool:
        """Add a group to the reply; `oldest` is the oldest version that it can be sampled from, `pinned` an evaluation's worker
        and version. Return False when what earlier attempts left cannot be read now or is too large for this reply, so that
        the group has to wait.
        """
        run, group_id = self._run, row["group_id"]
        try:
            prefix = self._prefix(group_id) if row["attempt"] else None
            has_journal = row["attempt"] and run.spec.environment.is_used
            journal = journals.frames_of(self._exchange, run, group_id) if has_journal else {}
        except UnopenedSegment as fault:
            self._exchange.note_unopened(fault)
            return False
        self._journal_bytes += (journal_bytes := journals.size_of(journal))
        if journal_bytes and self._journal_bytes > MAX_JOURNAL_BYTES and reply.lease.leases:
            return False
        lease = reply.lease.leases.add(
            group_id=group_id,
            attempt=row["attempt"] + 1,
            prompt_json=row["prompt_json"],
            seed=group_seed(run, group_id),
            num_generations=self._val_size if pinned else self._group_size,
            params=self._params,
            step=step,
            traceparent=group_traceparent(run.run_id, group_id),
        )
        if pinned:
            lease.pinned_version.session, lease.pinned_version.step = pinned[1]
        lease.tools_json = self._tools(row, run.validation if pinned else run.prompts)
        if run.spec.environment.is_used:
            lease.columns_json = self._exchange.group_queries.columns(run.run_id, group_id)
            lease.pinned_member = pinned[0] if pinned else ""
            journals.add_to_lease(self._exchange, run, lease, journal, payloads)
        with span("lease", lease.traceparent, group_id=group_id, attempt=lease.attempt, member_id=member_id):
            pass  # without duration: it marks when and to whom the group was leased
        if prefix is not None:
            payloads.append(prefix.arrays)
            lease.prefix_frame = len(payloads)
            returned = parse_message(pb.LeaseReturn, read_frame(prefix.header))
            lease.prefix_finish_reasons.extend(returned.finish_reasons)
        if (prefix is not None or journal) and row["oldest_step"] is not None:
            oldest = min(oldest, row["oldest_step"])
        holders = with_holder(row["holders"], lease.attempt, member_id)
        self._unwritten.append(NewLease(run.run_id, group_id, member_id, lease.attempt, oldest, holders))
        return True

    def _tools(self, row: sqlite3.Row, source: PromptSource | None) -> str:
        """Return the tools of a group's prompt as JSON; empty for none."""
        if source is None or not source.has_tools:
            return ""
        columns = self._exchange.group_queries.columns(self._run.run_id, row["group_id"])
        tools = tools_of_prompt(json.loads(row["prompt_json"]), json.loads(columns))
        return "" if tools is None else json.dumps(tools)

    def _prefix(self, group_id: int) -> Payload | None:
        """Return the prefix that an earlier worker returned of the group; None also where it is damaged. Raises
        UnopenedSegment.
        """
        try:
            prefix = self._exchange.ledger.payload(self._run.run_id, group_id, "prefix")
            return None if prefix is None else prefix._replace(header=read_frame(prefix.header))
        except DamagedRecord as damaged:
            damaged_groups.handle_damaged(self._exchange, self._run, damaged)
            return None


def admit(exchange: Exchange, run: ActiveRun, at_most: int) -> None:
    """Admit up to `at_most` prompts in the seeded order, as far as the admission rule allows. The next request goes on
    from there, also where a prompt cannot be read now.
    """
    ledger, run_id = exchange.ledger, run.run_id
    counters = ledger.counters(run_id)
    admitted = counters.get("groups:ever_admitted", 0)
    dropped = sum(n for name, n in counters.items() if name.startswith("groups:dropped:"))
    open_groups = admitted - dropped - counters.get("groups:trained", 0)
    number = admissible(
        open_groups,
        admitted,
        dropped,
        batch=run.batch_size,
        max_age=run.max_age,
        max_steps=run.spec.max_num_steps,
    )
    number = min(number, at_most)
    if number == 0 or exchange.admission_closed:
        return
    assert run.prompts is not None
    row = ledger.run(run_id)
    cursor, next_slot = row["cursor"], row["next_slot"]
    free_slots = list(reversed(ledger.free_slots.first(run_id, number)))
    new = []
    for group_id in range(admitted, admitted + number):
        try:
            prompt, columns = run.prompts.draw(cursor)
        except Unreadable as error:
            exchange.unreadable_data = str(error)
            break
        exchange.unreadable_data = ""
        cursor += 1
        if free_slots:
            slot = free_slots.pop()
            exchange.slots_changed()
            ledger.free_slots.remove(run_id, slot)
        else:
            slot, next_slot = next_slot, next_slot + 1
        new.append((group_id, slot, prompt, columns))
    exchange.groups.admit(run_id, "train", new)
    ledger.count(run_id, "groups:ever_admitted", len(new))
    ledger.update_run(run_id, cursor=cursor, next_slot=next_slot)


def _reconcile_held(exchange: Exchange, run: ActiveRun, requests: Sequence[pb.ExchangeRequest]) -> None:
    """Make the record agree with the groups that workers report to hold."""
    if not requests:
        return
    member_ids = [request.member_id for request in requests]
    on_record = exchange.group_queries.leased_by_member(run.run_id, member_ids)
    groups = exchange.groups
    for request in requests:
        member_id, held = request.member_id, set(request.lease.held.group_ids)
        # The worker does not know of some leases, because the reply with them was lost.
        if on_record[member_id] - held:
            groups.revoke_unknown(run.run_id, member_id, sorted(held))
        # It still works on groups whose leases were revoked while it was silent, and that no other worker got. Groups that
        # it has returned meanwhile do not have its name, and stay free. A suspected worker's claim may be outdated; it
        # repeats the claim when it reconnects.
        if held - on_record[member_id] and member_id not in exchange.suspected | exchange.overdue:
            groups.restore_leases(run.run_id, member_id, sorted(held))


def _admit_and_list_free(exchange: Exchange, run: ActiveRun, number: int) -> list[tuple[sqlite3.Row, int]]:
    """Return the first `number` free groups to train, each with its step, after admitting prompts where groups are missing.

    in_order: the slot decides the step. ready_first: the number of groups ahead that are in no batch yet.
    """
    rows = exchange.group_queries.free_to_lease(run.run_id, number)
    if len(rows) < number or exchange.ledger.free_slots.exist(run.run_id):
        admit(exchange, run, max(number, ADMITTED_AT_ONCE))
        rows = exchange.group_queries.free_to_lease(run.run_id, number)
    if run.spec.async_grpo.order == "in_order":
        return [(row, row["slot"] // run.batch_size) for row in rows]
    next_batch = exchange.ledger.run(run.run_id)["next_batch"]
    free, last_slot, ahead = [], -2, 0
    for row in rows:
        slot = row["slot"]
        # The group in the slot before is open itself; only a gap has to be counted.
        ahead = ahead + 1 if slot == last_slot + 1 else exchange.num_ahead(run, slot)
        last_slot = slot
        free.append((row, step_of_group(next_batch, ahead, run.batch_size)))
    return free


def was_given(row: sqlite3.Row, attempt: int, member_id: str) -> bool:
    """Return whether the worker was given this attempt at the group, however long ago."""
    return held_attempt(row["holders"], attempt) == member_id


def group_seed(run: ActiveRun, group_id: int) -> int:
    """Return the seed of a group, 63 bits: a function of the spec's seed and the group's id."""
    text = f"{run.spec.seed}/{group_id}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def revoke_work(exchange: Exchange, member_ids: list[str], *, with_leases: bool) -> int:
    """Revoke the score tasks and, with `with_leases`, the leases of silent or overdue workers, which may return. The
    first
    result of any attempt wins. Return the number of groups.
    """
    number = exchange.groups.revoke_tasks(member_ids)
    if with_leases:
        number += exchange.groups.revoke_leases(member_ids)
    return number


def revoke_from_member(exchange: Exchange, member_id: str, *, crashed: bool = False) -> int:
    """Revoke every lease and task of a member that is gone; return the number of leases."""
    if crashed and exchange.active is not None:
        quarantine.on_crash(exchange, exchange.active, member_id)
    exchange.reserved = {group: holder for group, holder in exchange.reserved.items() if holder != member_id}
    exchange.versions.pop(member_id, None)
    exchange.offered.pop(member_id, None)
    exchange.overdue.discard(member_id)
    exchange.suspected.discard(member_id)
    released = exchange.groups.revoke_leases([member_id])
    exchange.groups.revoke_tasks([member_id])
    return released


def params_message(generation: GenerationSection) -> common_pb2.SamplingParams:
    """Return `policy.generation` as a message with every field set, which `paceline.rollout.engine.SamplingParams` reads."""
    return common_pb2.SamplingParams(
        max_new_tokens=generation.max_new_tokens,
        min_new_tokens=generation.min_new_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        stop_token_ids=generation.stop_token_ids,
    )

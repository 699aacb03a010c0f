"""A request for leases: prompts are admitted if too few groups are free, and groups are leased to workers. No other
module leases groups; `group.py` takes the results."""

from __future__ import annotations

import hashlib
import itertools
import json
import sqlite3
from collections.abc import Sequence
from functools import partial

from paceline.data.messages import tools_of_prompt
from paceline.data.prompts import PromptSource
from paceline.groups import Version, with_holder
from paceline.services.coordinator.exchange import evaluation, leases, turn_logs
from paceline.services.coordinator.exchange.admission import admit, serving_samplers, step_of_group, versions_of
from paceline.services.coordinator.exchange.batches import selection
from paceline.services.coordinator.exchange.replies import Outcome, ok
from paceline.services.coordinator.exchange.state import TRAIN, ActiveRun, Exchange
from paceline.services.coordinator.exchange.uploads.intake import Arrived
from paceline.services.coordinator.ledger.groups import NewLease
from paceline.services.coordinator.ledger.segments import DamagedRecord, Frame, Payload, UnopenedSegment, read_frame
from paceline.spec import GenerationSection
from paceline.tracing import group_traceparent, span
from paceline.v1 import common_pb2
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import parse_message

MAX_ROOM = 1 << 16
"""Largest number of completions in one answer, even if a worker states more room."""

MAX_TURN_LOG_BYTES = 32 << 20
"""Largest number of bytes of turn logs in the answers of one call; an answer with only one lease may exceed it."""

ADMITTED_AT_ONCE = 64
"""Number of groups that are admitted at a time (more if requested), because more at once would delay other requests."""


def answer(exchange: Exchange, run: ActiveRun, arrived: Arrived, now_s: float) -> Outcome:
    return lease_groups(exchange, run, [arrived.request])[0]


def lease_groups(exchange: Exchange, run: ActiveRun, requests: Sequence[pb.ExchangeRequest]) -> list[Outcome]:
    """Answer lease requests of different workers, each up to its room: groups of an evaluation first, then by slot."""
    _reconcile_held(exchange, run, [request for request in requests if request.lease.HasField("held")])
    free: list[tuple[sqlite3.Row, int]] = []
    if run.prompts is not None and not exchange.takes_no_work(run):
        num_groups = sum(max(1, min(request.lease.room, MAX_ROOM) // TRAIN.size(run)) for request in requests)
        free = _admit_and_list_free(exchange, run, num_groups + len(run.state.reserved))
    new = _NewLeases(exchange, run, free)
    outcomes = [new.answer(request) for request in requests]
    new.write()
    return outcomes


class _NewLeases:
    """Leases of one `lease_groups` call: each worker in turn gets free groups, and all leases are written together."""

    def __init__(self, exchange: Exchange, run: ActiveRun, free: list[tuple[sqlite3.Row, int]]):
        self._exchange, self._run = exchange, run
        self._group_size, self._val_size = TRAIN.size(run), run.spec.grpo.val_samples_per_prompt
        self._params = params_message(run.spec.policy.generation)
        self._samplers = serving_samplers(exchange, run) if run.spec.environment.is_used else []
        self._free = free
        """Free groups to train, each with its step, in the order of slots."""
        self._turn_log_bytes = 0
        self._unwritten: list[NewLease] = []

    def answer(self, request: pb.ExchangeRequest) -> Outcome:
        """Return the answer to one worker; `write` records its leases. A worker gets nothing without an acknowledged
        version of the weights, or while it is overdue. Groups to train are leased only if the run takes work, their age
        is at most η, and no quarantine prevents it (`choose_groups`). `transport/dispatch.py` has checked protocol,
        term, secret, run and role."""
        exchange, run = self._exchange, self._run
        reply = ok(request)
        reply.lease.SetInParent()
        member_id = request.member_id
        versions = versions_of(exchange, run, member_id, self._samplers)
        if versions is None or run.prompts is None or member_id in exchange.workers.overdue:
            return Outcome(reply, empty=True)
        if leases.quarantined_groups(exchange, run):
            self.write()  # `choose_groups` reads the groups that each worker holds
        payloads: list[Frame] = []
        room, reserved = min(request.lease.room, MAX_ROOM), len(run.state.reserved)
        num_measured = max(room // self._val_size, 1 if room > 0 else 0)
        if sampler := self._sampler_of_evaluation(member_id):
            pinned_id, version = sampler
            measured = evaluation.to_lease(exchange, run, pinned_id, version, num_measured + reserved)
            for row in leases.choose_groups(exchange, run, member_id, measured, num_measured):
                added = self._add(member_id, row, version.step, reply, payloads, pinned=sampler)
                room -= self._val_size * added
        if leases.quarantined_groups(exchange, run):
            self.write()
        num_groups = max(room // self._group_size, 1 if room > 0 and not reply.lease.leases else 0)
        limit = num_groups + reserved if num_groups else 0
        leasable = list(itertools.takewhile(lambda pair: versions.may_lease(pair[1], run.max_age), self._free[:limit]))
        steps = {row["group_id"]: step for row, step in leasable}
        free = [row for row, _ in leasable]
        for row in leases.choose_groups(exchange, run, member_id, free, num_groups):
            step = steps[row["group_id"]]
            if self._add(member_id, row, versions.oldest(step, run.max_age), reply, payloads, step=step):
                self._free.remove((row, step))
        return Outcome(reply, payloads, empty=not reply.lease.leases)

    def write(self) -> None:
        if self._unwritten:
            self._exchange.groups.lease(self._unwritten)
            self._unwritten.clear()

    def _sampler_of_evaluation(self, member_id: str) -> tuple[str, Version] | None:
        exchange, run = self._exchange, self._run
        if not run.spec.environment.is_used:
            return member_id, exchange.workers.versions[member_id]
        sampler = evaluation.choose_sampler(exchange, run, self._samplers)
        return None if sampler is None else (sampler.member_id, sampler.version)

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
        """Add a group to the reply; `oldest` is the step of the oldest version that may sample it, `pinned` has an
        evaluation's worker and version. Return False if the results of earlier attempts cannot be read now or are
        too large for this reply; the group then waits."""
        run, group_id = self._run, row["group_id"]
        try:
            prefix = self._prefix(group_id) if row["attempt"] else None
            has_turns = row["attempt"] and run.spec.environment.is_used
            turns = self._turn_log(group_id) if has_turns else {}
        except UnopenedSegment as fault:
            self._exchange.notices.warn_of_unopened(fault)
            return False
        self._turn_log_bytes += (turn_log_bytes := turn_logs.size_of(turns))
        if turn_log_bytes and self._turn_log_bytes > MAX_TURN_LOG_BYTES and reply.lease.leases:
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
            turn_logs.add_to_lease(self._exchange, run, lease, turns, payloads)
        with span("lease", lease.traceparent, group_id=group_id, attempt=lease.attempt, member_id=member_id):
            pass  # no duration: marks when and to whom the group was leased
        if prefix is not None:
            payloads.append(prefix.arrays)
            lease.prefix_frame = len(payloads)
            returned = parse_message(pb.LeaseReturn, read_frame(prefix.header))
            lease.prefix_finish_reasons.extend(returned.finish_reasons)
        if (prefix is not None or turns) and row["oldest_step"] is not None:
            oldest = min(oldest, row["oldest_step"])
        holders = with_holder(row["holders"], lease.attempt, member_id)
        self._unwritten.append(NewLease(run.run_id, group_id, member_id, lease.attempt, oldest, holders))
        return True

    def _tools(self, row: sqlite3.Row, source: PromptSource | None) -> str:
        if source is None or not source.has_tools:
            return ""
        columns = self._exchange.group_queries.columns(self._run.run_id, row["group_id"])
        tools = tools_of_prompt(json.loads(row["prompt_json"]), json.loads(columns))
        return "" if tools is None else json.dumps(tools)

    def _prefix(self, group_id: int) -> Payload | None:
        """Return a group's prefix from an earlier attempt; None if none is intact. Raises UnopenedSegment."""
        try:
            prefix = self._exchange.ledger.payload(self._run.run_id, group_id, "prefix")
            return None if prefix is None else prefix._replace(header=read_frame(prefix.header))
        except DamagedRecord as damaged:
            selection.handle_damaged(self._exchange, self._run, damaged)
            return None

    def _turn_log(self, group_id: int) -> dict[int, list[tuple[Frame, Frame]]]:
        """Return the recorded turns of a group by sample; end lives with an unreadable turn. Raises UnopenedSegment."""
        while True:
            try:
                return turn_logs.frames_of(self._exchange, self._run, group_id)
            except DamagedRecord as damaged:
                selection.handle_damaged(self._exchange, self._run, damaged)


def _reconcile_held(exchange: Exchange, run: ActiveRun, requests: Sequence[pb.ExchangeRequest]) -> None:
    if not requests:
        return
    member_ids = [request.member_id for request in requests]
    on_record = exchange.group_queries.leased_by_member(run.run_id, member_ids)
    groups = exchange.groups
    for request in requests:
        member_id, held = request.member_id, set(request.lease.held.group_ids)
        # The worker does not know some leases, because the reply with them was lost.
        if on_record[member_id] - held:
            groups.revoke_unknown(run.run_id, member_id, sorted(held))
        # It still works on groups whose leases were revoked while it was silent, and that no other worker got. Groups
        # that it has returned meanwhile do not have its name, and stay free. A suspected worker's claim may be
        # outdated; it repeats the claim when it reconnects.
        if held - on_record[member_id] and member_id not in exchange.workers.suspected | exchange.workers.overdue:
            groups.restore_leases(run.run_id, member_id, sorted(held))


def _admit_and_list_free(exchange: Exchange, run: ActiveRun, number: int) -> list[tuple[sqlite3.Row, int]]:
    """Return up to `number` free groups to train, in the order of slots, each with the step that will train it. Admit
    prompts first if too few groups are free, or if a dropped group has left its slot.

    The step decides which versions may sample a group. With `in_order` it is slot // B. With `ready_first`, batches
    take scored groups of any slot, so the step is estimated: the next batch + (open, unbatched groups in lower slots)
    // B."""
    rows = exchange.group_queries.free_to_lease(run.run_id, number)
    if len(rows) < number or exchange.ledger.free_slots.exist(run.run_id):
        admit(exchange, run, max(number, ADMITTED_AT_ONCE))
        rows = exchange.group_queries.free_to_lease(run.run_id, number)
    if run.spec.async_grpo.order == "in_order":
        return [(row, row["slot"] // run.batch_size) for row in rows]
    next_batch = exchange.ledger.run(run.run_id)["next_batch"]
    free, last_slot, ahead = [], -2, 0
    num_waiting = partial(exchange.group_queries.num_waiting, run.run_id)
    for row in rows:
        slot = row["slot"]
        # If the slot before has a free group, that group is one more ahead; only gaps between free groups are counted.
        ahead = ahead + 1 if slot == last_slot + 1 else run.state.num_ahead(slot, num_waiting)
        last_slot = slot
        free.append((row, step_of_group(next_batch, ahead, run.batch_size)))
    return free


def group_seed(run: ActiveRun, group_id: int) -> int:
    """Return the 63-bit seed of a group: a function of the spec's seed and the group's id."""
    text = f"{run.spec.seed}/{group_id}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def params_message(generation: GenerationSection) -> common_pb2.SamplingParams:
    """Return `policy.generation` as a message with every field set, for `paceline.rollout.engine.SamplingParams`."""
    return common_pb2.SamplingParams(
        max_new_tokens=generation.max_new_tokens,
        min_new_tokens=generation.min_new_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        stop_token_ids=generation.stop_token_ids,
    )

"""Commands of a person on runs (cancel, pause, resume, drop groups, checkpoint) and on workers (drain). Changes are
events of the run.

`resume` reads again the files that a person may have corrected while a run was paused: data sets, the chat template,
reward functions. A run with a bundle gets the corrected files in a new bundle. For a run without one, the digests of
the functions' files are recorded if the files are on this machine; the coordinator never runs them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import xxhash

from paceline.errors import Conflict, InvalidInput, NotFound, Unavailable
from paceline.host.regular_file import read_named
from paceline.services.coordinator.exchange.batches import selection, session_faults
from paceline.services.coordinator.exchange.state import ActiveRun
from paceline.services.coordinator.exchange.uploads.prompt_check import PromptCheck
from paceline.services.coordinator.ledger.ledger import ACTIVE_STATES
from paceline.services.coordinator.lifecycle.run_data import Openings, RunBundles, changed_data_warnings
from paceline.services.coordinator.lifecycle.run_states import RunStates, set_state
from paceline.services.coordinator.lifecycle.worker_faults import Faults
from paceline.services.coordinator.members.registry import Member, Members
from paceline.services.coordinator.pool.assignments import Assignments
from paceline.services.coordinator.pool.run_context import RunContext
from paceline.spec import RunSpec
from paceline.spec.reading import spec_of_run
from paceline.v1 import worker_pb2

MAX_GRACE_S = 86_400.0


class Commands:
    def __init__(
        self,
        context: RunContext,
        states: RunStates,
        faults: Faults,
        assignments: Assignments,
        resumption: Resumption,
        members: Members,
    ):
        self._resumption, self._members = resumption, members
        self._context, self._states, self._faults, self._assignments = context, states, faults, assignments
        self._ledger, self._exchange, self._delays = context.ledger, context.exchange, context.delays

    async def cancel(self, run_id: str) -> None:
        """End a run, also one that has failed and could be resumed. Raises NotFound; Conflict if it has ended."""
        row = self._ledger.run(run_id)
        if row["state"] not in ("queued", "failed", *ACTIVE_STATES):
            verb = "was" if row["state"] == "cancelled" else "has"
            raise Conflict(f"run {run_id} {verb} already {row['state']}")
        await self._states.end(run_id, "cancelled", "cancelled by request")

    async def pause(self, run_id: str) -> None:
        """Pause a run until a person resumes it. Raises NotFound, Conflict."""
        async with self._context.lock:
            row = self._ledger.run(run_id)
            if row["state"] != "running" and not (row["state"] == "paused" and self._ledger.is_retried(run_id)):
                raise Conflict(f"run {run_id} is {row['state']}, not running; only a running run can be paused")
            with self._ledger.transaction():
                set_state(self._ledger, run_id, "paused")
            if self._delays.retried == run_id:
                self._delays.retried = ""
        await self._context.watchers.notify("lease", "batch")

    async def resume(self, run_id: str, bundle: str = "") -> None:
        """Continue a paused run. If it has failed, or if another run has its workers now, queue it again. Files whose
        faults paused the run are read again, from `bundle` if it is given. Raises NotFound, Conflict; InvalidInput if
        `bundle` cannot be used, or if it is given but the run was submitted without a bundle; DataError and Unreadable
        if a data set cannot be used."""
        changes = await self._resumption.changes(run_id, bundle)
        run = await self._resumption.read(run_id, bundle, changes)
        async with self._context.lock:
            row = self._ledger.run(run_id)
            if row["state"] not in ("paused", "failed"):
                raise Conflict(f"run {run_id} is {row['state']}; only a paused or failed run can be resumed")
            active = self._exchange.active
            has_workers = active is None or active.run_id == run_id
            goes_on = row["state"] == "paused" and has_workers and run_id not in self._delays.passed_over
            with self._ledger.transaction():
                facts = self._resumption.take(run_id, run, bundle, changes)
                set_state(self._ledger, run_id, "running" if goes_on else "queued", **facts)
                self._ledger.update_run(run_id, dropped_in_a_row=0)
                session_faults.reset(self._exchange, run_id)
                self._ledger.checkpoints.clear_damage(run_id)  # a person may have restored them
            self._delays.passed_over.discard(run_id)
            self._delays.start_again_s = 0.0
            if self._delays.retried == run_id:
                self._delays.retried = ""
        self._context.run_log.resume(run_id)
        if self._exchange.active is None or self._exchange.active.run_id == run_id:
            self._faults.clear()  # the person has not seen the faults of another active run
        if self._exchange.active is not None:
            await self._assignments.assign_all()  # before work is leased, so that changed functions are loaded first
        await self._context.watchers.notify("lease", "task", "batch")

    def checkpoint(self, run_id: str) -> tuple[int, str]:
        """Order a checkpoint of the run that trains, unless there is one of its newest step; return the number of the
        run's newest event, and the path of the existing checkpoint (empty after an order). Raises NotFound; Conflict
        if no learner has the run now."""
        row, sequence = self._ledger.run(run_id), self._ledger.last_sequence(run_id)
        newest = self._ledger.checkpoints.newest(run_id)
        if newest is not None and newest.step == row["next_step"]:
            return sequence, newest.path
        run, learner = self._exchange.active, self._assignments.learner()
        if run is None or run.run_id != run_id or learner is None or not learner.connected:
            raise Conflict(
                f"run {run_id} is {row['state']}, and no learner that could write a checkpoint works on it; "
                "order a checkpoint while the run trains"
            )
        order = worker_pb2.CheckpointDirective(run_id=run_id)
        learner.direct(worker_pb2.ConnectResponse(checkpoint=order))
        return sequence, ""

    def drain(self, member_id: str, grace_s: float) -> Member:
        """Order a worker (of a learner: all ranks) to finish or return its work within `grace_s` seconds, and then to
        leave. Raises NotFound, InvalidInput; Unavailable for a member whose stream is broken."""
        if not 0.0 <= grace_s <= MAX_GRACE_S:
            raise InvalidInput(f"grace_s is {grace_s:g}, but must be from 0 to {MAX_GRACE_S:g} seconds")
        member = self._members.get(member_id)
        if member is None:
            raise NotFound(f"no member {member_id[:80]!r}; `paceline members` lists all members")
        if not member.connected:
            raise Unavailable(f"{member_id} is disconnected and will expire unless it reconnects; drain it after that")
        order = worker_pb2.DrainDirective(grace_s=grace_s)
        for peer in self._members.all():
            if peer is member or (
                member.introduction.learner_id and peer.introduction.learner_id == member.introduction.learner_id
            ):
                peer.direct(worker_pb2.ConnectResponse(drain=order))
        return member

    async def drop_groups(self, run_id: str, group_ids: list[int]) -> None:
        """Drop groups of the fixed batch of a paused run, even if another run has the workers now. If the paused run
        has the workers, end its session. Raises NotFound, Conflict, InvalidInput."""
        spec, _ = await asyncio.to_thread(spec_of_run, run_id, self._ledger.run(run_id)["spec_yaml"])
        async with self._context.lock:
            row = self._ledger.run(run_id)
            if row["state"] != "paused":
                raise Conflict(
                    f"run {run_id} is {row['state']}; groups are dropped only while it is paused (`paceline pause`)"
                )
            active, run = self._exchange.active, ActiveRun(run_id, spec, None, None)
            if active is not None and active.run_id == run_id:
                run = active
            with self._ledger.transaction():
                selection.drop_from_batch(self._exchange, run, group_ids, time.monotonic())
                notices = self._exchange.notices.take()
                self._context.run_log.write_down(notices)
        if run is active:
            self._assignments.end_session()
        await self._context.watchers.notify("lease", "batch")


MAX_NAMED = 5


class Resumption:
    def __init__(self, context: RunContext, prompts: PromptCheck, bundles: RunBundles):
        self._ledger, self._exchange = context.ledger, context.exchange
        self._prompts, self._bundles = prompts, bundles
        self._openings = Openings()

    async def changes(self, run_id: str, bundle: str) -> list[str]:
        """Check a run's new bundle, and return the paths of the files that it changes. Raises NotFound,
        InvalidInput."""
        before = self._ledger.bundle(run_id)
        if not bundle or bundle == before:
            return []
        spec, _ = await asyncio.to_thread(spec_of_run, run_id, self._ledger.run(run_id)["spec_yaml"])
        if not before:
            raise InvalidInput(f"run {run_id} was submitted without a bundle; resume it without a bundle")
        await asyncio.to_thread(self._bundles.check, spec, bundle)
        return await asyncio.to_thread(self._bundles.changes, spec, before, bundle)

    async def read(self, run_id: str, bundle: str = "", changes: Sequence[str] = ()) -> ActiveRun | None:
        """Open the data sets of the active run again if dropped groups have paused the run, or if `changes`, the files
        that its new bundle changes, contain data sets. Return the run with the data sets, or None if they stay as they
        are. An opening continues after a caller has cancelled, and the next call gets its outcome. Raises DataError,
        Unreadable for a data set that cannot be used now: the run stays paused."""
        run = self._exchange.active
        if run is None or run.run_id != run_id:
            return None
        has_other_data = any(path.startswith("data/") for path in changes)
        if not has_other_data and not self._ledger.drop_reason_of_pause(run_id):
            return None
        bundle = bundle or self._ledger.bundle(run_id)
        data = await self._openings.open((run_id, bundle), partial(self._bundles.open_data, run.spec, bundle))
        return replace(run, prompts=data.prompts, validation=data.validation)

    def take(self, run_id: str, run: ActiveRun | None, bundle: str = "", changes: Sequence[str] = ()) -> dict[str, str]:
        """Use the data that were read, clear earlier failures, and record the changes. Return the facts for the event
        of the run's state. Call it inside a transaction."""
        if changes:
            self._ledger.add_event(run_id, "warning", {"message": self._changed_bundle(run_id, bundle, changes)})
        new_bundle = {"bundle": bundle} if bundle else {}
        active = self._exchange.active
        if active is None or active.run_id != run_id:
            return new_bundle
        self._exchange.groups.clear_failures(run_id)
        self._ledger.episodes.clear_failures(run_id)
        admitted = self._ledger.counters(run_id).get("groups:ever_admitted", 0)
        active.state.clear_failures(first_group=admitted)
        in_bundle = bool(bundle or self._ledger.bundle(run_id))
        facts = new_bundle | ({} if in_bundle else {"functions": function_digests(active.spec)})
        warnings = (
            [] if in_bundle else changed_function_warnings(self._ledger.function_digests(run_id), facts["functions"])
        )
        if run is not None and run.prompts is not None:
            before = self._ledger.data_fingerprint(run_id)
            warnings += changed_data_warnings(before, run.spec, run.prompts)
            facts["data"] = run.prompts.fingerprint
            self._exchange.activate(replace(active, prompts=run.prompts, validation=run.validation))
            self._prompts.begin(run_id, run.spec)
        for warning in warnings:
            self._ledger.add_event(run_id, "warning", {"message": warning})
        return facts

    def _changed_bundle(self, run_id: str, bundle: str, changes: Sequence[str]) -> str:
        named = ", ".join(changes[:MAX_NAMED]) + (", …" if len(changes) > MAX_NAMED else "")
        before = self._ledger.bundle(run_id)
        return (
            f"the run continues with bundle {bundle} instead of {before}: {len(changes)} of its files differ ({named}); "
            "from now on groups are generated and scored with the new files"
        )


def function_digests(spec: RunSpec) -> str:
    """Return a JSON object with the digest of each reward function's file that is on this machine."""
    digests = {}
    for reward in spec.rewards:
        path, colon, _ = reward.function.rpartition(":")
        try:
            digests[path] = xxhash.xxh3_64(read_named(path)).hexdigest() if colon else ""
        except OSError:
            continue
    return json.dumps({path: digest for path, digest in digests.items() if digest})


def changed_function_warnings(before: str, now: str) -> list[str]:
    """Return a warning for each file of a reward function whose digest has changed."""
    recorded, current = json.loads(before or "{}"), json.loads(now)
    return [
        f"the reward functions in {path!r} have changed since the run was last started (XXH3 {recorded[path]}; now "
        f"{digest}): further groups are scored by the new code"
        for path, digest in current.items()
        if recorded.get(path, digest) != digest
    ]


def started_facts(run: ActiveRun, bundle: str) -> dict[str, str]:
    """Return facts for the event of a run's start: the data's fingerprint, and without a bundle the functions'
    digests."""
    fingerprint = run.prompts.fingerprint if run.prompts is not None else ""
    functions = {} if bundle else {"functions": function_digests(run.spec)}
    return {"data": fingerprint} | functions

"""Admits prompts; decides how far generation may run ahead of training, and which versions lease holders may sample
from.

B groups make a step; η bounds the age, in steps, of tokens at admission and at a lease. With `in_order` no trained
token is older; with `ready_first` late groups may train up to the age `hard_max_age_steps`. A rollout worker samples
from its own version. An environment worker uses any serving rollout worker whose version is new enough for the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.errors import Unreadable
from paceline.groups import Version
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange
from paceline.v1 import common_pb2


def admissible(open_groups: int, admitted: int, dropped: int, *, batch: int, max_age: int, max_steps: int) -> int:
    """Return the number of groups that may be admitted now.

    A group is admitted while open < (η + 1)·B and admitted - dropped < max_steps·B. Here open is the number of groups
    that are neither trained nor dropped; the second condition holds until all remaining steps have their groups. η = 0
    is synchronous GRPO."""
    return max(0, min((max_age + 1) * batch - open_groups, max_steps * batch - (admitted - dropped)))


def admit(exchange: Exchange, run: ActiveRun, at_most: int) -> None:
    """Admit up to `at_most` prompts in seeded order, within the admission rule. Unreadable prompts are left to the next
    call."""
    ledger, run_id = exchange.ledger, run.run_id
    counters = ledger.counters(run_id)
    admitted = counters.get("groups:ever_admitted", 0)
    dropped = sum(n for name, n in counters.items() if name.startswith("groups:dropped:"))
    open_groups = admitted - dropped - counters.get("groups:trained", 0)
    number = admissible(
        open_groups, admitted, dropped, batch=run.batch_size, max_age=run.max_age, max_steps=run.spec.max_num_steps
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
            run.state.note_data(str(error))
            break
        run.state.note_data("")
        cursor += 1
        if free_slots:
            slot = free_slots.pop()
            run.state.slots_changed()
            ledger.free_slots.remove(run_id, slot)
        else:
            slot, next_slot = next_slot, next_slot + 1
        new.append((group_id, slot, prompt, columns))
    exchange.groups.admit(run_id, "train", new)
    ledger.count(run_id, "groups:ever_admitted", len(new))
    ledger.update_run(run_id, cursor=cursor, next_slot=next_slot)


def step_of_group(next_batch: int, num_ahead: int, batch: int) -> int:
    """Return the step of a group that has `num_ahead` open, unbatched groups before it."""
    return next_batch + num_ahead // batch


def may_lease(version_step: int, step: int, max_age: int) -> bool:
    """Return whether `version_step` is at most `max_age` (η) steps behind `step`."""
    return version_step >= step - max_age


def must_wait(live_oldest: list[int], step: int, max_age: int) -> bool:
    """Return whether the batch of `step` should wait for a live group whose age is exactly η at this step, because its
    age would exceed η if it were left out. `live_oldest` holds, for each live group, the oldest version that its
    tokens can have. A group has that age at one step only, so it delays one batch at most. No batch waits for an
    older group."""
    return any(step - oldest == max_age for oldest in live_oldest)


class SamplingWorker(NamedTuple):
    """A rollout worker that samples tokens for environment workers."""

    member_id: str
    address: str
    version: Version
    """Newest version of the weights that the worker acknowledged."""


class SamplableVersions(NamedTuple):
    """Steps of the versions that a worker can sample from."""

    steps: tuple[int, ...]

    def may_lease(self, step: int, max_age: int) -> bool:
        """Return whether any of the versions is at most `max_age` (η) steps behind `step`."""
        return any(may_lease(version_step, step, max_age) for version_step in self.steps)

    def oldest(self, step: int, max_age: int) -> int:
        """Return the step of the oldest version that is at most `max_age` (η) steps behind `step`."""
        return min(version_step for version_step in self.steps if may_lease(version_step, step, max_age))


def serving_samplers(exchange: Exchange, run: ActiveRun) -> list[SamplingWorker]:
    """Return the rollout workers that are ready and not draining, expelled or suspected, sorted by id."""
    samplers = [
        SamplingWorker(member.member_id, member.introduction.address, exchange.workers.versions[member.member_id])
        for member in exchange.senders.of_role(common_pb2.ROLE_ROLLOUT)
        if member.ready_run == run.run_id
        and member.connected
        and member.fault is None
        and not (member.draining or member.weights.expelled or member.suspected)
        and member.member_id in exchange.workers.versions
    ]
    return sorted(samplers)


def versions_of(
    exchange: Exchange, run: ActiveRun, member_id: str, samplers: Sequence[SamplingWorker]
) -> SamplableVersions | None:
    """Return the versions that a worker can sample from; None if the worker gets no leases of this run."""
    member = exchange.senders.get(member_id)
    if member is None or member.role != run.lease_role:
        return None
    if member.role == common_pb2.ROLE_ENVIRONMENT:
        steps = tuple(sorted({sampler.version.step for sampler in samplers}))
        return SamplableVersions(steps) if steps else None
    version = exchange.workers.versions.get(member_id)
    return None if version is None else SamplableVersions((version.step,))

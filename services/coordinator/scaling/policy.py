"""How many workers a pool should have, from what was measured. Pure: `decide` maps a state and a measurement to a state.

The policy computes a need instead of following a queue, so a cold start cannot make it swing: workers that are starting count
as present, and nothing that is measured while they start asks for more of them.
Where several pools do the same work, each has a share of the demand (`shares.py`).

    demand   groups/s that the learner trains while it does not wait: B / (time of a step without its wait)
    rate     groups/s of one worker whose room is full: groups completed / (seconds x workers x occupied share of their room)
    need     share of the pool x demand x (1 + HEADROOM) / rate

A pool grows as soon as the need exceeds it, by the factor MAX_GROWTH at most. It shrinks when the need has been below
SHRINK_BELOW of it for `hold_s`, which is at least twice the cold start. Without a run it goes to its least size after `idle_s`.

Promise: with a load that does not change, the size settles; after a change it moves in one direction until it has settled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

HEADROOM = 0.1
"""Share of the need that is added, because groups end in bursts and the longest of a batch are late."""

GROW_ABOVE = 1.06
"""Need by size above which a pool grows; below HEADROOM, so that noise alone does not change a size."""

SHRINK_BELOW = 0.8
"""Need by size below which a pool shrinks, once that has lasted."""

MAX_GROWTH = 2.0
"""Most workers by present ones in one decision, where there are any."""

HALF_LIFE_GROUPS = 1024.0
"""Groups after which what was measured of the rate has half of its weight."""

HALF_LIFE_STEPS = 8.0
"""Steps after which a measured demand has half of its weight."""

NEW_LOAD = 1.5
"""Ratio of a step's demand to the mean from which it counts as a new load, so that the mean begins anew."""

NEW_RATE = 3.0
"""Ratio of a measured rate to the mean from which it counts as another kind of work, so that the mean begins anew."""

MIN_GROUPS = 32
"""Groups from which a rate counts as known."""


@dataclass(frozen=True)
class Bounds:
    """What a pool may be, and how long it takes to change."""

    least: int = 0
    most: int = 64
    first: int = 1
    """Workers with which a run begins, before anything is measured."""
    cold_start_s: float = 60.0
    """Seconds from the order of a worker to its first group."""
    idle_s: float = 300.0
    """Seconds without a run after which the pool goes to `least`."""
    low_s: float | None = None
    """Seconds for which a need has to be low before the pool shrinks; None: 300, or twice the cold start if that is more."""

    @property
    def hold_s(self) -> float:
        """Seconds for which a need has to be low before the pool shrinks."""
        return max(300.0, 2 * self.cold_start_s) if self.low_s is None else self.low_s


@dataclass(frozen=True)
class Measurement:
    """What was measured since the decision before."""

    seconds: float
    has_run: bool
    """A run trains or waits in the queue."""
    ready: int
    """Workers that take work."""
    starting: int
    """Workers that were ordered and do not take work yet."""
    completed: float
    """Groups that the pool completed."""
    held: float
    """Groups that its workers hold now."""
    occupied: float
    """Mean share of the ready workers' room that was taken, from 0 to 1."""
    steps: int = 0
    """Steps that were trained."""
    step_s: float = 0.0
    """Mean seconds of these steps without the wait for the batch."""
    groups_per_step: float = 0.0
    """Groups that a step takes: B, and those that are dropped for each."""
    share: float = 1.0
    """Share of the demand that this pool is to serve, where several pools do the same work."""


@dataclass(frozen=True)
class PoolState:
    """What the policy remembers of a pool between decisions."""

    desired: int = 0
    """Workers that the pool should have."""
    groups: float = 0.0
    """Work that was done, in groups; older work has less weight."""
    held: float = 0.0
    """Groups that the pool held at the measurement before."""
    full_worker_s: float = 0.0
    """Seconds of workers with full room in which they were made, with the same weights."""
    demand: float = 0.0
    """Groups/s that the learner can train; 0 while it is not known."""
    share: float = 1.0
    """Share of the demand that this pool is to serve."""
    low_s: float = 0.0
    """Seconds for which the need has been low."""
    largest_low: int = 0
    """Largest size that was needed meanwhile."""
    idle_s: float = 0.0
    """Seconds without a run."""

    @property
    def rate(self) -> float:
        """Groups/s of a worker whose room is full; 0 while it is not known."""
        return self.groups / self.full_worker_s if self.groups >= MIN_GROUPS and self.full_worker_s else 0.0

    @property
    def is_known(self) -> bool:
        """Return whether both demand and rate were measured."""
        return bool(self.rate and self.demand)

    @property
    def need(self) -> float:
        """Workers, as a fraction, that keep the learner fed; 0 while it is not known."""
        return self.share * self.demand * (1 + HEADROOM) / self.rate if self.rate else 0.0

    @property
    def wanted(self) -> int:
        """Workers that keep the learner fed: one at least while any is needed; 0 while it is not known."""
        return math.ceil(self.need - 1e-9)


def decide(state: PoolState, measured: Measurement, bounds: Bounds) -> PoolState:
    """Return the state after a measurement; `desired` is the new size."""
    if not measured.has_run:
        idle_s = state.idle_s + measured.seconds
        size = bounds.least if idle_s >= bounds.idle_s else max(state.desired, bounds.least)
        return replace(state, desired=min(size, bounds.most), idle_s=idle_s, low_s=0.0, largest_low=0)
    state = replace(_learnt(state, measured), idle_s=0.0, share=measured.share)
    if not state.is_known and state.share:
        size = max(state.desired, bounds.first, bounds.least)
        return replace(state, desired=min(size, bounds.most), low_s=0.0, largest_low=0)
    current = max(state.desired, bounds.least, 1 if state.share else 0)
    wanted = min(max(state.wanted, bounds.least, 1 if state.share else 0), bounds.most)
    if wanted > current and state.need > GROW_ABOVE * current:
        present = max(measured.ready + measured.starting, 1)
        size = min(wanted, max(math.ceil(present * MAX_GROWTH), current))
        return replace(state, desired=size, low_s=0.0, largest_low=0)
    if wanted < current and state.need < SHRINK_BELOW * current:
        low_s, largest = state.low_s + measured.seconds, max(state.largest_low, wanted)
        if low_s < bounds.hold_s:
            return replace(state, low_s=low_s, largest_low=largest)
        return replace(state, desired=largest, low_s=0.0, largest_low=0)
    return replace(state, desired=min(current, bounds.most), low_s=0.0, largest_low=0)


def _learnt(state: PoolState, measured: Measurement) -> PoolState:
    """Return the state with what a measurement says of demand and rate.

    The work is what was completed plus half of what is held more than before: while a pool fills, its first seconds have no
    completed groups, or only short ones, and would look slow.
    """
    if measured.steps and measured.step_s > 0:
        demand = measured.groups_per_step / measured.step_s
        kept = 0.5 ** (measured.steps / HALF_LIFE_STEPS)
        if not state.demand or not 1 / NEW_LOAD < demand / state.demand < NEW_LOAD:
            kept = 0.0
        state = replace(state, demand=kept * state.demand + (1 - kept) * demand)
    groups = measured.completed + 0.5 * (measured.held - state.held)
    full_worker_s = measured.seconds * measured.ready * measured.occupied
    if full_worker_s <= 0:
        return replace(state, held=measured.held)
    kept = 0.5 ** (measured.completed / HALF_LIFE_GROUPS)
    if (
        state.rate
        and groups >= MIN_GROUPS
        and not 1 / NEW_RATE < groups / full_worker_s / state.rate < NEW_RATE
    ):
        kept = 0.0
    return replace(
        state,
        groups=max(kept * state.groups + groups, 0.0),
        held=measured.held,
        full_worker_s=kept * state.full_worker_s + full_worker_s,
    )

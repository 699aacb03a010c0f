"""The number of workers that a pool should have, from measurements. Pure: `decide` maps a state and a measurement to a
state.

The policy computes a need instead of following a queue, so a cold start cannot make it swing: workers that are starting
count as present, and no measurement during their start requests more of them. If several pools do the same work, each
has a share of the demand (`scaler.py`).

    demand   groups/s that the learner trains while it does not wait: B / (time of a step without its wait)
    rate     groups/s of one worker whose room is full: groups completed / (seconds x workers x occupied share of their room)
    need     share of the pool x demand x (1 + HEADROOM) / rate

A pool grows as soon as the need exceeds its size, by the factor MAX_GROWTH at most. It shrinks when the need has been
below SHRINK_BELOW of its size for `hold_s`, which is at least twice the cold start. Without a run it goes to its least
size after `idle_s`.

Promise: under a constant load the size becomes constant. After a change of the load, the size moves in one direction
until it is constant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from paceline.errors import InvalidInput

HEADROOM = 0.1
"""Share of the need that is added, because groups end in bursts and the longest of a batch are late."""

GROW_ABOVE = 1.06
"""Ratio of need to size above which a pool grows; below 1 + HEADROOM, so that noise alone does not change a size."""

SHRINK_BELOW = 0.8
"""Ratio of need to size below which a pool shrinks, if it stays there for `hold_s`."""

MAX_GROWTH = 2.0
"""Largest ratio of the new size to the present workers in one decision, if there are any."""

HALF_LIFE_GROUPS = 1024.0
"""Number of further groups after which a measured rate has half of its weight."""

HALF_LIFE_STEPS = 8.0
"""Number of further steps after which a measured demand has half of its weight."""

NEW_LOAD = 1.5
"""Ratio (or its inverse) of a step's demand to the mean at which a new load begins: the mean begins anew."""

NEW_RATE = 3.0
"""Ratio (or its inverse) of a measured rate to the mean at which other work begins: the mean begins anew."""

MIN_GROUPS = 32
"""Smallest number of completed groups from which a rate is computed."""


@dataclass(frozen=True)
class Bounds:
    least: int = 0
    most: int = 64
    first: int = 1
    """Number of workers at the beginning of a run, before anything is measured."""
    cold_start_s: float = 60.0
    """Seconds from the order of a worker to its first group."""
    idle_s: float = 300.0
    """Seconds without a run after which the pool goes to `least`."""
    low_s: float | None = None
    """Seconds for which the need must be low before the pool shrinks; None: 300, or twice the cold start if longer."""

    @property
    def hold_s(self) -> float:
        """Seconds for which the need must be low before the pool shrinks."""
        return max(300.0, 2 * self.cold_start_s) if self.low_s is None else self.low_s


@dataclass(frozen=True)
class Measurement:
    seconds: float
    has_run: bool
    """True if a run that needs the pool's role trains now."""
    ready: int
    """Number of workers that take work."""
    starting: int
    """Number of workers that were ordered and do not take work yet."""
    completed: float
    """Number of groups that the pool completed."""
    held: float
    """Number of groups that the pool's workers hold now."""
    occupied: float
    """Mean occupied share of the room of workers that take work, from 0 to 1."""
    steps: int = 0
    step_s: float = 0.0
    """Mean seconds of a step without the wait for its batch."""
    groups_per_step: float = 0.0
    """Number of groups that a step takes: B, and the groups that are dropped for each step."""
    share: float = 1.0
    """Share of the demand that this pool serves, if several pools do the same work."""


@dataclass(frozen=True)
class PoolState:
    desired: int = 0
    """Number of workers that the pool should have."""
    groups: float = 0.0
    """Completed work, as a number of groups; older work has less weight."""
    held: float = 0.0
    """Number of groups that the pool held at the previous measurement."""
    full_worker_s: float = 0.0
    """Time in which `groups` were completed, in seconds of one fully occupied worker, with the weights of `groups`."""
    demand: float = 0.0
    """Groups/s that the learner can train; 0 while it is unknown."""
    share: float = 1.0
    low_s: float = 0.0
    """Seconds for which the need has been low."""
    largest_low: int = 0
    """Largest size that was needed during `low_s`."""
    idle_s: float = 0.0
    """Seconds without a run."""

    @property
    def rate(self) -> float:
        """Groups/s of a worker whose room is full; 0 while it is unknown."""
        return self.groups / self.full_worker_s if self.groups >= MIN_GROUPS and self.full_worker_s else 0.0

    @property
    def is_known(self) -> bool:
        return bool(self.rate and self.demand)

    @property
    def need(self) -> float:
        """Number of workers, with a fraction, that keep the learner busy; 0 while it is unknown."""
        return self.share * self.demand * (1 + HEADROOM) / self.rate if self.rate else 0.0

    @property
    def needed(self) -> int:
        """Whole number of workers that keep the learner busy, at least 1 if any is needed; 0 while it is unknown."""
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
    needed = min(max(state.needed, bounds.least, 1 if state.share else 0), bounds.most)
    if needed > current and state.need > GROW_ABOVE * current:
        present = max(measured.ready + measured.starting, 1)
        size = min(needed, max(math.ceil(present * MAX_GROWTH), current))
        return replace(state, desired=size, low_s=0.0, largest_low=0)
    if needed < current and state.need < SHRINK_BELOW * current:
        low_s, largest = state.low_s + measured.seconds, max(state.largest_low, needed)
        if low_s < bounds.hold_s:
            return replace(state, low_s=low_s, largest_low=largest)
        return replace(state, desired=largest, low_s=0.0, largest_low=0)
    return replace(state, desired=min(current, bounds.most), low_s=0.0, largest_low=0)


def _learnt(state: PoolState, measured: Measurement) -> PoolState:
    """Return the state with the demand and rate of a measurement. The work is the completed groups plus half of the
    increase in held groups: while a pool fills, its first seconds have no completed groups, or only short ones, and
    the pool would seem slow."""
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
    if state.rate and groups >= MIN_GROUPS and not 1 / NEW_RATE < groups / full_worker_s / state.rate < NEW_RATE:
        kept = 0.0
    return replace(
        state,
        groups=max(kept * state.groups + groups, 0.0),
        held=measured.held,
        full_worker_s=kept * state.full_worker_s + full_worker_s,
    )


ROLES = ("rollout", "reward", "environment")
MOST_WORKERS = 100_000
MOST_SECONDS = 86_400.0
MAX_TEXT = 128
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Names of pools, which are parts of URLs."""

NumberT = TypeVar("NumberT", int, float)


@dataclass(frozen=True)
class PoolConfig:
    role: str
    name: str
    """Name of the pool; the role for a pool of all its workers."""
    members: str = ""
    """Text with which the member ids of the pool's workers begin; empty for all workers of the role."""
    bounds: Bounds = field(default_factory=Bounds)
    cost: float = 0.0
    """Cost of a worker for an hour, in any currency; 0 if it is unknown."""

    def has(self, role: str, member_id: str) -> bool:
        return role == self.role and member_id.startswith(self.members)


KEYS = (
    "role",
    "name",
    "members",
    "minWorkers",
    "maxWorkers",
    "firstWorkers",
    "coldStartSeconds",
    "idleSeconds",
    "holdSeconds",
    "costPerHour",
)
"""Settings of a pool (docs/operate/scaling.md)."""


def read_pools(texts: Iterable[str]) -> tuple[PoolConfig, ...]:
    """Return the pools of `--pool`. Raises InvalidInput, also for two pools with a common name or worker."""
    pools: list[PoolConfig] = []
    for pool in map(read_pool, texts):
        for other in pools:
            if pool.name == other.name:
                raise InvalidInput(f"two pools have the name {pool.name!r}; rename one of them")
            overlaps = pool.members.startswith(other.members) or other.members.startswith(pool.members)
            if pool.role == other.role and overlaps:
                raise InvalidInput(
                    f"members {pool.members!r} of {pool.name} and {other.members!r} of {other.name} name the same {pool.role} "
                    "workers; choose members so that none is a prefix of another"
                )
        pools.append(pool)
    return tuple(pools)


def read_pool(text: str) -> PoolConfig:
    """Return the pool of KEY=VALUE,KEY=VALUE. Raises InvalidInput with the name, the value and the allowed values."""
    settings = _settings(text)
    role, members = settings.get("role", ""), settings.get("members", "")
    if role not in ROLES:
        raise InvalidInput(f"role is {role[:MAX_TEXT]!r}, but must be one of {', '.join(ROLES)}")
    if len(members) > MAX_TEXT or not members.isprintable():
        raise InvalidInput(
            f"members is {members[:MAX_TEXT]!r}, but must be the first characters of member names: at most "
            f"{MAX_TEXT} characters, all printable"
        )
    name = settings.get("name", role)
    if NAME.fullmatch(name) is None or (name != role and (name in ROLES or not members)):
        raise InvalidInput(
            f"name is {name[:MAX_TEXT]!r}, but must be the role, or, for a pool with members, letters, digits and ._-"
        )
    usual = Bounds()
    hold = settings.get("holdSeconds", "")
    bounds = Bounds(
        least=_number(settings, "minWorkers", int, usual.least, MOST_WORKERS),
        most=_number(settings, "maxWorkers", int, usual.most, MOST_WORKERS),
        first=_number(settings, "firstWorkers", int, usual.first, MOST_WORKERS),
        cold_start_s=_number(settings, "coldStartSeconds", float, usual.cold_start_s, MOST_SECONDS),
        idle_s=_number(settings, "idleSeconds", float, usual.idle_s, MOST_SECONDS),
        low_s=_number(settings, "holdSeconds", float, 0.0, MOST_SECONDS) if hold else None,
    )
    if bounds.least > bounds.most or bounds.most < 1:
        raise InvalidInput(
            f"minWorkers is {bounds.least} and maxWorkers {bounds.most}: maxWorkers must be at least 1 and "
            "not below minWorkers"
        )
    cost = _number(settings, "costPerHour", float, 0.0, math.inf)
    return PoolConfig(role, name, members, bounds, cost)


def _settings(text: str) -> dict[str, str]:
    settings: dict[str, str] = {}
    for part in text.split(","):
        key, separator, value = part.partition("=")
        if key not in KEYS or not separator:
            raise InvalidInput(
                f"{part[:MAX_TEXT]!r} is not a setting of a pool; the settings are {'=, '.join(KEYS)}=, with commas between them"
            )
        if key in settings:
            raise InvalidInput(
                f"{key} is given twice: {settings[key][:MAX_TEXT]!r} and {value[:MAX_TEXT]!r}; give it once"
            )
        settings[key] = value
    return settings


def _number(
    settings: Mapping[str, str], name: str, kind: Callable[[str], NumberT], usual: NumberT, most: float
) -> NumberT:
    text = settings.get(name, "")
    if not text:
        return usual
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not math.isfinite(value) or not 0 <= value <= most:
        limit = "" if math.isinf(most) else f" to {most:g}"
        raise InvalidInput(f"{name} is {text[:MAX_TEXT]!r}, but must be a number from 0{limit}")
    return value

"""Decides the sizes of one coordinator's pools: measures, decides once in a period, and explains the decisions.

Every role has a pool of all its workers, so that `paceline status` can name the bottleneck even if nothing scales.
`--pool` gives bounds, and divides a role into several pools that share its demand (`shares`). One owner: the
coordinator's loop calls `check`, and everything else reads.

Promise: no pool shrinks because the coordinator lacks information. After a restart `desired` raises Unavailable until
the workers had time to reconnect, and a pool that nobody has scaled yet keeps its present size. A request for a
pool's size changes no size.

Rollout workers on several kinds of GPUs are several pools of one role. The role's demand is divided with the cheapest
work first: the cost of a group is the cost of a worker for an hour, divided by the groups that the worker completes in
an hour. The pool with the cheapest groups serves the demand up to its largest size, the next pool serves the rest. A
pool with workers keeps its position in this order unless another pool is cheaper by MARGIN, so that measured rates
cannot make two pools swap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paceline.errors import NotFound, Unavailable, counted
from paceline.services.coordinator.exchange.notices import Notice
from paceline.services.coordinator.exchange.state import Exchange
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.members.registry import Members
from paceline.services.coordinator.scaling.meter import Meter, Period, measure
from paceline.services.coordinator.scaling.policy import HEADROOM, ROLES, Measurement, PoolConfig, PoolState, decide

PERIOD_S = 15.0
"""Default number of seconds between two decisions."""

RECONNECT_S = 30.0
"""Seconds after a coordinator's restart in which its workers reconnect and nothing is decided."""

UNUSED_S = 3600.0
"""Seconds without a request for a pool's size after which the pool counts as not scaled."""

MAX_SHOWN = 64
"""Largest number of characters of an unknown pool name that a message shows."""

NO_RUN = "no run trains on groups now"


@dataclass
class Sized:
    config: PoolConfig
    state: PoolState | None = None
    """State after the newest decision; None before the first."""
    measured: Measurement | None = None
    is_declared: bool = False
    """True if `--pool` names the pool, so that it is scaled whenever a run needs it."""
    requested_s: float | None = None
    """Monotonic time of the newest request for the pool's size; None for a pool that nobody scales."""


@dataclass(frozen=True)
class Report:
    """The limit of the run as a text, and the pools with their states."""

    text: str
    wait_fraction: float
    pools: Mapping[str, Sized] = field(default_factory=dict)


class Scaler:
    def __init__(
        self,
        ledger: Ledger,
        exchange: Exchange,
        members: Members,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
        pools: Sequence[PoolConfig] = (),
    ):
        """`pools` are those of `--pool`; no two have a name or a worker in common (`read_pools`)."""
        self._ledger, self._clock, self._period_s = ledger, clock, period_s
        now_s = clock()
        self.meter = Meter(ledger, exchange, members, now_s)
        self._reconnected_s = now_s + (RECONNECT_S if ledger.term > 1 else 0.0)
        self._decide_s = now_s
        self._roles = frozenset[str]()
        self._whole = {role: Sized(PoolConfig(role, role)) for role in ROLES}
        """The pools that have all workers of a role. The key is the role."""
        declared = [Sized(pool, is_declared=True) for pool in pools]
        self._whole |= {sized.config.role: sized for sized in declared if not sized.config.members}
        self._parts = {sized.config.name: sized for sized in declared if sized.config.members}

    def note(self, notices: Iterable[Notice]) -> None:
        """Count trained steps and the learner's metrics from the exchange's notices."""
        self.meter.note(notices, self._clock())

    async def check(self) -> None:
        """Measure; decide at the end of a period, and at once when a run begins or ends."""
        now_s = self._clock()
        self.meter.tick(now_s)
        began = (self.meter.running() is not None) != bool(self._roles)
        if now_s < self._reconnected_s or not (began or now_s >= self._decide_s):
            return
        self._decide_s = now_s + self._period_s
        self._decide(self.meter.take(now_s), now_s)

    def desired(self, name: str) -> int:
        """Return the size that a pool should have. Raises Unavailable after a restart, NotFound for an unknown pool."""
        now_s, pools = self._clock(), self._shown()
        sized = pools.get(name)
        if sized is None:
            raise NotFound(f"there is no pool {name[:MAX_SHOWN]!r}; the pools are {', '.join(sorted(pools))}")
        sized.requested_s = now_s
        if now_s < self._reconnected_s or sized.state is None:
            wait_s = max(self._reconnected_s - now_s, 0.0)
            raise Unavailable(
                f"the coordinator has just started, and its workers reconnect: sizes are decided in {wait_s:.0f} s; keep the "
                "present sizes"
            )
        bounds = sized.config.bounds
        return min(max(sized.state.desired, bounds.least), bounds.most)

    def report(self) -> Report:
        now_s = self._clock()
        pools = self._shown()
        if now_s < self._reconnected_s:
            return Report(
                f"the coordinator has just started; measuring begins in {self._reconnected_s - now_s:.0f} s", 0.0, pools
            )
        if self.meter.running() is None:
            return Report(NO_RUN, 0.0, pools)
        wait_fraction = self.meter.wait_fraction(now_s)
        facts = {
            name: PoolFacts(sized.measured.ready, sized.state, sized.config.cost)
            for name, sized in pools.items()
            if sized.state is not None and sized.measured is not None and sized.measured.has_run
        }
        return Report(advise(facts, wait_fraction), wait_fraction, pools)

    def _shown(self) -> dict[str, Sized]:
        """Return the pools by name: the parts of a divided role, else the pool of the whole role."""
        divided = {sized.config.role for sized in self._parts.values()}
        return {role: sized for role, sized in self._whole.items() if role not in divided} | self._parts

    def _decide(self, period: Period, now_s: float) -> None:
        self._roles = period.roles
        for role, whole in self._whole.items():
            self._decide_pool(whole, period, 1.0, now_s)
            parts = {name: part for name, part in self._parts.items() if part.config.role == role}
            demand = whole.state.demand if whole.state is not None else 0.0
            by_part = shares(demand, {name: _supply(part, period) for name, part in parts.items()}, HEADROOM)
            for name, part in parts.items():
                self._decide_pool(part, period, by_part[name], now_s)

    def _decide_pool(self, sized: Sized, period: Period, share: float, now_s: float) -> None:
        measured = sized.measured = measure(period, sized.config, share)
        if sized.is_declared and measured.has_run:
            sized.requested_s = now_s
        elif sized.requested_s is not None and now_s - sized.requested_s > UNUSED_S:
            sized.requested_s = None
        state = sized.state or PoolState(held=measured.held)
        if sized.state is None or sized.requested_s is None:  # only a person has scaled it until now
            state = replace(state, desired=measured.ready + measured.starting)
        sized.state = decide(state, measured, sized.config.bounds)


def _supply(sized: Sized, period: Period) -> Supply:
    state = sized.state or PoolState()
    present = len(period.of_pool(sized.config))
    return Supply(state.rate, sized.config.bounds.most, sized.config.cost, bool(present or state.desired))


MARGIN = 0.15
"""Share by which groups must be cheaper before a pool without workers is preferred to a pool that has some."""


class Supply(NamedTuple):
    rate: float
    """Groups/s of one fully occupied worker; 0 while it is unknown."""
    most: int
    """Largest number of workers that the pool may have."""
    cost: float
    """Cost of a worker for an hour, in any currency; 0 if it is unknown."""
    is_used: bool
    """True if the pool has workers, or should have some."""


def shares(demand: float, pools: Mapping[str, Supply], headroom: float) -> dict[str, float]:
    """Return the share of the demand for each pool. The sum is 1; if the pools together are too small, the most
    expensive one gets the rest. A pool with an unknown rate counts with the mean rate of the others; without a known
    demand or any known rate the pool with the cheapest workers serves all of it."""
    rates = [pool.rate for pool in pools.values() if pool.rate]
    usual = sum(rates) / len(rates) if rates else 1.0
    order = sorted(pools, key=lambda name: (_cost_of_group(pools[name], usual), name))
    found = dict.fromkeys(pools, 0.0)
    left = 1.0
    for name in order:
        pool = pools[name]
        able = 1.0
        if demand and rates:
            able = pool.most * (pool.rate or usual) / (demand * (1 + headroom))
        found[name] = min(left, able)
        left -= found[name]
        if left <= 1e-9:
            break
    if left > 1e-9 and order:
        found[order[-1]] += left
    return found


def _cost_of_group(pool: Supply, usual: float) -> float:
    cost = pool.cost / (pool.rate or usual)
    return cost * (1 - MARGIN) if pool.is_used else cost


BALANCED = 0.05
"""Largest share of its time that the learner may wait while the advice names only the learner as the run's limit."""


class PoolFacts(NamedTuple):
    workers: int
    """Number of workers that take work."""
    state: PoolState
    cost: float = 0.0
    """Cost of a worker for an hour, in any currency; 0 if it is unknown."""


def advise(pools: Mapping[str, PoolFacts], wait_fraction: float) -> str:
    """Return the limit of a run and the change that helps, in one to three sentences. `wait_fraction` is the share of
    the learner's time in which it waits for its batch."""
    measured = {name: facts for name, facts in pools.items() if facts.state.is_known and facts.state.share}
    empty = [name for name, facts in pools.items() if facts.state.share and not facts.workers]
    if empty:
        return f"no {empty[0]} worker takes work: start a worker, or read the log of the last worker"
    if not measured:
        return "nothing is measured yet: no step was trained, or too few groups were completed"
    # The groups that a pool can complete, as a ratio to those that the learner demands of it.
    supply = {
        name: facts.workers * facts.state.rate / (facts.state.share * facts.state.demand)
        for name, facts in measured.items()
    }
    slowest = min(supply, key=lambda name: supply[name])
    facts = measured[slowest]
    if wait_fraction > BALANCED and facts.state.needed > facts.workers:
        return _of_pool(slowest, facts, supply[slowest], wait_fraction)
    text = (
        f"the learner limits the run: it waits {wait_fraction:.0%} of its time for its batch, and the pools could "
        f"feed a learner that is {supply[slowest]:.1f} times as fast. "
        "More or faster ranks shorten a step, but more workers do not"
    )
    if wait_fraction > BALANCED:
        text = (
            f"the learner waits {wait_fraction:.0%} of its time, though the {slowest} pool could complete "
            f"{supply[slowest]:.1f} times what the learner trains: single groups are late, or weights arrive late. A larger "
            "async_grpo.max_trajectory_age_steps lets generation run further ahead"
        )
    return text + _spare(measured)


def _of_pool(name: str, facts: PoolFacts, supply: float, wait_fraction: float) -> str:
    needed = facts.state.needed
    gain = min(1 / max(1 - wait_fraction, 0.01), needed / facts.workers)
    more = needed - facts.workers
    cost = f", for {more * facts.cost:,.2f} more an hour" if facts.cost else ""
    return (
        f"the {name} pool limits the run: its {counted(facts.workers, 'worker')} complete{'s' if facts.workers == 1 else ''} "
        f"{supply:.0%} of what the learner can train, and the learner waits {wait_fraction:.0%} of its time. With {counted(needed, 'worker')}{cost} a step would take "
        f"{1 / gain:.0%} of its present time"
    )


def _spare(measured: Mapping[str, PoolFacts]) -> str:
    """Return a sentence on the pool with the most surplus workers; empty if there is none."""
    fewer = {name: facts.workers - max(1, facts.state.needed) for name, facts in measured.items()}
    name = max(fewer, key=lambda pool: (fewer[pool], pool))
    if fewer[name] < 1:
        return ""
    facts = measured[name]
    saved = f", which saves {fewer[name] * facts.cost:,.2f} an hour" if facts.cost else ""
    return f". The {name} pool needs {max(1, facts.state.needed)} of its {counted(facts.workers, 'worker')}, with {HEADROOM:.0%} to spare{saved}"

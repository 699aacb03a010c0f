"""The sizes of the pools of one coordinator: it measures, decides once in a period, and says what it decided and why.

Every role has a pool of all its workers, so that `paceline status` can name the bottleneck whether anything scales or not. A
scaler that asks for a pool gives its bounds; several pools of one role share its demand (`shares.py`). One owner: the
coordinator's loop calls `check`, and everything else reads.

Promise: nobody is told to shrink a pool because the coordinator does not know. After a restart `desired` raises Unavailable until
the workers had time to come back, and a pool that is new here begins with the workers that it has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from paceline.errors import Busy, InvalidInput, Unavailable
from services.coordinator.exchange.state import Exchange, Notice
from services.coordinator.ledger.ledger import Ledger
from services.coordinator.members.registry import Members
from services.coordinator.scaling.advice import PoolFacts, advise
from services.coordinator.scaling.meter import Meter, Period, measure
from services.coordinator.scaling.policy import HEADROOM, Measurement, PoolState, decide
from services.coordinator.scaling.pools import ROLES, PoolConfig
from services.coordinator.scaling.shares import Supply, shares

PERIOD_S = 15.0
"""Default of the seconds between two decisions."""

SETTLE_S = 30.0
"""Seconds after a coordinator's restart in which its workers come back, so that nothing is decided."""

FORGET_S = 3600.0
"""Seconds after which a pool that nobody asks for any more is forgotten."""

MAX_POOLS = 64
NO_RUN = "no run trains on groups now"


@dataclass
class Sized:
    """A pool, and what the policy knows of it."""

    config: PoolConfig
    state: PoolState | None = None
    """None before its first decision."""
    measured: Measurement | None = None
    """The newest measurement."""
    asked_s: float | None = None
    """Time of the last call of its scaler; None for a pool that nobody scales."""


@dataclass(frozen=True)
class Report:
    """What limits the run, in words and by pool."""

    text: str
    wait_fraction: float
    pools: Mapping[str, Sized] = field(default_factory=dict)


class Scaler:
    """The pools of one coordinator."""

    def __init__(
        self,
        ledger: Ledger,
        exchange: Exchange,
        members: Members,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._ledger, self._clock, self._period_s = ledger, clock, period_s
        now_s = clock()
        self.meter = Meter(ledger, exchange, members, now_s)
        self.changed = asyncio.Condition()
        """Notified after every decision, and when the coordinator stops."""
        self._settled_s = now_s + (SETTLE_S if ledger.term > 1 else 0.0)
        self._decide_s = now_s
        self._roles = frozenset[str]()
        """Roles that a run needed at the last check."""
        self._pools = {(role, ""): Sized(PoolConfig(role)) for role in ROLES}

    def note(self, notices: Iterable[Notice]) -> None:
        """Take the exchange's notices: trained steps and the learner's metrics."""
        self.meter.note(notices, self._clock())

    async def check(self) -> None:
        """Measure; decide at the end of a period, and at once when a run begins or ends."""
        now_s = self._clock()
        self.meter.tick(now_s)
        began = (self.meter.running() is not None) != bool(self._roles)
        if now_s < self._settled_s or not (began or now_s >= self._decide_s):
            return
        self._decide_s = now_s + self._period_s
        self._decide(self.meter.take(now_s), now_s)
        async with self.changed:
            self.changed.notify_all()

    async def stop(self) -> None:
        """Wake everybody who waits for a decision."""
        async with self.changed:
            self.changed.notify_all()

    def desired(self, config: PoolConfig) -> int:
        """Return the workers that a pool should have; its bounds count from now on. Raises Unavailable after a restart of the
        coordinator, InvalidInput for a pool that overlaps another, Busy for too many."""
        now_s = self._clock()
        sized = self._sized(config, now_s)
        if now_s < self._settled_s or sized.state is None:
            wait_s = max(self._settled_s - now_s, 0.0)
            raise Unavailable(
                f"the coordinator has just started, and its workers come back: sizes are decided in {wait_s:.0f} s; keep the "
                "present ones"
            )
        bounds = config.bounds
        return min(max(sized.state.desired, bounds.least), bounds.most)

    def report(self) -> Report:
        """Return what limits the run that trains."""
        now_s = self._clock()
        pools = self._shown()
        if now_s < self._settled_s:
            return Report(
                f"the coordinator has just started; it measures in {self._settled_s - now_s:.0f} s",
                0.0,
                pools,
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
        """Return the pools by name: those of a scaler that names members, else the one of the whole role."""
        divided = {role for role, members in self._pools if members}
        return {
            f"{role} ({members}…)" if members else role: sized
            for (role, members), sized in self._pools.items()
            if members or role not in divided
        }

    def _sized(self, config: PoolConfig, now_s: float) -> Sized:
        """Return the pool of a scaler, which is new here if nobody has asked for it."""
        key = (config.role, config.members)
        sized = self._pools.get(key)
        if sized is None:
            for role, members in self._pools:
                overlaps = members.startswith(config.members) or config.members.startswith(members)
                if role == config.role and members and overlaps:
                    raise InvalidInput(
                        f"scaler metadata members {config.members!r} and {members!r} of another scaler name the same "
                        f"{role} workers; give pools names of which none begins with another"
                    )
            if len(self._pools) >= MAX_POOLS:
                raise Busy(f"{MAX_POOLS} pools are sized already, the most that there may be", FORGET_S)
            sized = self._pools[key] = Sized(config)
            self._decide_s = now_s  # the first decision is made at the next check
        sized.config, sized.asked_s = config, now_s
        return sized

    def _decide(self, period: Period, now_s: float) -> None:
        for key, sized in list(self._pools.items()):
            if sized.asked_s is not None and now_s - sized.asked_s > FORGET_S:
                sized.asked_s = None
                if key[1]:
                    del self._pools[key]
        self._roles = period.roles
        for role in ROLES:
            whole = self._pools[role, ""]
            self._decide_pool(whole, period, 1.0)
            parts = {members: s for (r, members), s in self._pools.items() if r == role and members}
            demand = whole.state.demand if whole.state is not None else 0.0
            by_part = shares(demand, {name: _supply(part, period) for name, part in parts.items()}, HEADROOM)
            for name, part in parts.items():
                self._decide_pool(part, period, by_part[name])

    def _decide_pool(self, sized: Sized, period: Period, share: float) -> None:
        measured = sized.measured = measure(period, sized.config, share)
        state = sized.state or PoolState(held=measured.held)
        if sized.state is None or sized.asked_s is None:  # its size is a person's so far
            state = replace(state, desired=measured.ready + measured.starting)
        sized.state = decide(state, measured, sized.config.bounds)


def _supply(sized: Sized, period: Period) -> Supply:
    state = sized.state or PoolState()
    present = len(period.of_pool(sized.config))
    return Supply(state.rate, sized.config.bounds.most, sized.config.cost, bool(present or state.desired))

"""What limits a run, in words: which pool, by how much, what to change, and what it would bring. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from paceline.services.coordinator.scaling.policy import HEADROOM, PoolState

BALANCED = 0.05
"""Wait of the learner, as a share of its time, up to which nothing limits it but itself."""


class PoolFacts(NamedTuple):
    """A pool, and what the policy knows of it."""

    workers: int
    """Workers that take work."""
    state: PoolState
    cost: float = 0.0
    """Cost of a worker for an hour; 0: not named."""


def advise(pools: Mapping[str, PoolFacts], wait_fraction: float) -> str:
    """Return one to three sentences. `wait_fraction` is the share of the learner's time in which it waits for its batch."""
    known = {name: facts for name, facts in pools.items() if facts.state.is_known and facts.state.share}
    empty = [name for name, facts in pools.items() if facts.state.share and not facts.workers]
    if empty:
        return f"no {empty[0]} worker takes work: start one, or read why the last one ended in its log"
    if not known:
        return "nothing is measured yet: no step was trained, or too few groups were completed"
    supply = {name: _supply(facts) for name, facts in known.items()}
    slowest = min(supply, key=lambda name: supply[name])
    facts = known[slowest]
    if wait_fraction > BALANCED and facts.state.wanted > facts.workers:
        return _of_pool(slowest, facts, supply[slowest], wait_fraction)
    text = (
        f"the learner limits: it waits {wait_fraction:.0%} of its time for its batch, and the pools could feed one that is "
        f"{supply[slowest]:.1f} times as fast. More or faster ranks of it shorten a step, more workers do not"
    )
    if wait_fraction > BALANCED:
        text = (
            f"the learner waits {wait_fraction:.0%} of its time, though the {slowest} pool could complete "
            f"{supply[slowest]:.1f} times what it trains: single groups are late, or weights arrive late. A larger "
            "async_grpo.max_trajectory_age_steps lets generation run further ahead"
        )
    return text + _spare(known)


def _of_pool(name: str, facts: PoolFacts, supply: float, wait_fraction: float) -> str:
    """Return the advice for a pool that is too small."""
    needed = facts.state.wanted
    gain = min(1 / max(1 - wait_fraction, 0.01), needed / facts.workers)
    more = needed - facts.workers
    cost = f", for {more * facts.cost:,.2f} more an hour" if facts.cost else ""
    return (
        f"the {name} pool limits: its {facts.workers} workers complete {supply:.0%} of what the learner can train, "
        f"which waits {wait_fraction:.0%} of its time. With {needed} workers{cost} a step would take "
        f"{1 / gain:.0%} of its present time"
    )


def _spare(known: Mapping[str, PoolFacts]) -> str:
    """Return a sentence on the pool with the most workers that nobody needs; empty where there is none."""
    fewer = {name: facts.workers - max(1, facts.state.wanted) for name, facts in known.items()}
    name = max(fewer, key=lambda pool: (fewer[pool], pool))
    if fewer[name] < 1:
        return ""
    facts = known[name]
    saved = f", which saves {fewer[name] * facts.cost:,.2f} an hour" if facts.cost else ""
    return f". The {name} pool needs {max(1, facts.state.wanted)} of its {facts.workers} workers, with {HEADROOM:.0%} to spare{saved}"


def _supply(facts: PoolFacts) -> float:
    """Return what the pool completes, by what the learner asks of it."""
    return facts.workers * facts.state.rate / (facts.state.share * facts.state.demand)

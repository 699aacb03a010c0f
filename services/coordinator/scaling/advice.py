"""What limits a run, in words: which pool, by how much, what to change, and what it would bring. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from services.coordinator.scaling.policy import HEADROOM, PoolState

BALANCED = 0.05
"""Wait of the learner, as a share of its time, up to which nothing is said to limit it but itself."""


class PoolFacts(NamedTuple):
    """A pool, and what the policy knows of it."""

    workers: int
    state: PoolState


def advise(pools: Mapping[str, PoolFacts], wait_fraction: float) -> str:
    """Return one or two sentences. `wait_fraction` is the share of the learner's time in which it waits for its batch."""
    known = {name: facts for name, facts in pools.items() if facts.state.rate and facts.state.demand}
    if not known:
        return "nothing is known yet: no step was trained, or no group completed"
    supply = {name: facts.workers * facts.state.rate / facts.state.demand for name, facts in known.items()}
    slowest = min(supply, key=lambda name: supply[name])
    facts = known[slowest]
    needed = max(1, math.ceil(facts.state.need - 1e-9))
    if wait_fraction > BALANCED and needed > facts.workers:
        faster = 1 / max(1 - wait_fraction, 0.01)
        gain = (
            min(faster, needed * facts.state.rate / (facts.workers * facts.state.rate))
            if facts.workers
            else faster
        )
        return (
            f"the {slowest} pool limits: its {facts.workers} workers complete {supply[slowest]:.0%} of what the learner can train, "
            f"which waits {wait_fraction:.0%} of its time. With {needed} workers a step would take "
            f"1/{gain:.2f} of its present time"
        )
    spare = {name: facts for name, facts in known.items() if _is_spare(facts)}
    text = f"the learner limits: it waits {wait_fraction:.0%} of its time for its batch"
    if wait_fraction > BALANCED:
        text = (
            f"the learner waits {wait_fraction:.0%} of its time, though the {slowest} pool could complete "
            f"{supply[slowest]:.1f} times what it trains: single groups are late, or weights arrive late"
        )
    if spare:
        name, facts = max(spare.items(), key=lambda pair: pair[1].workers - math.ceil(pair[1].state.need))
        fewer = max(1, math.ceil(facts.state.need - 1e-9))
        text += (
            f". The {name} pool needs {fewer} of its {facts.workers} workers, with {HEADROOM:.0%} to spare"
        )
    return text


def _is_spare(facts: PoolFacts) -> bool:
    return facts.workers > 1 and math.ceil(facts.state.need - 1e-9) < facts.workers

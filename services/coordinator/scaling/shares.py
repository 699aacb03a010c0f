"""Division of one role's demand between its pools: the cheapest work first. Pure.

Rollout workers on several kinds of GPUs are several pools of one role. Each group costs what a worker costs by the groups that it
completes. The pool with the cheapest groups serves the demand up to its largest size, the next one what is left. A pool that
has workers keeps its place unless another one is cheaper by MARGIN, so that measured rates cannot make two pools swap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

MARGIN = 0.15
"""Share by which a pool's groups have to be cheaper than those of a pool that has workers."""


class Supply(NamedTuple):
    """What a pool can do, and what it costs."""

    rate: float
    """Groups/s of one full worker; 0 while it is not known."""
    most: int
    """Largest size."""
    cost: float
    """Cost of a worker for an hour, in any currency; 0 where none is named."""
    is_used: bool
    """The pool has workers, or was told to have some."""


def shares(demand: float, pools: Mapping[str, Supply], headroom: float) -> dict[str, float]:
    """Return the share of the demand for each pool, in all 1 unless the pools together are too small for it: the most expensive
    one then has the rest.

    A pool whose rate is not known counts with the mean rate of the others; without a known demand or any known rate the cheapest
    workers serve all of it.
    """
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

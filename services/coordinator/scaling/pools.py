"""Pools that are sized: a role, the workers that belong to it, its bounds and its cost, as the metadata of a scaler says. Pure.

KEDA sends the metadata of a trigger as texts by name; `paceline up --scale` sends the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from paceline.errors import InvalidInput
from services.coordinator.scaling.policy import Bounds

ROLES = ("rollout", "reward", "environment")
MOST_WORKERS = 100_000
MOST_SECONDS = 86_400.0
MAX_TEXT = 128
NumberT = TypeVar("NumberT", int, float)


@dataclass(frozen=True)
class PoolConfig:
    """One pool, as its scaler describes it."""

    role: str
    members: str = ""
    """First characters of the member ids that belong to the pool; empty: all workers of the role."""
    bounds: Bounds = field(default_factory=Bounds)
    cost: float = 0.0
    """Cost of a worker for an hour, in any currency; 0: not named."""

    def has(self, role: str, member_id: str) -> bool:
        """Return whether a worker belongs to the pool."""
        return role == self.role and member_id.startswith(self.members)


KEYS = {
    "pool": "rollout, reward or environment",
    "members": "first characters of the names of the pool's workers; all workers of the role without it",
    "minWorkers": "fewest workers, also without a run",
    "maxWorkers": "most workers",
    "firstWorkers": "workers with which a run begins, before anything is measured",
    "coldStartSeconds": "seconds from the order of a worker to its first group",
    "idleSeconds": "seconds without a run after which the pool goes to its fewest workers",
    "holdSeconds": "seconds for which fewer workers have to be enough before the pool shrinks",
    "costPerHour": "cost of a worker for an hour, in any currency that all pools share",
    "scalerAddress": "read by KEDA, not here",
}
"""Metadata of a trigger, and what it says."""

IGNORED = frozenset(
    {"scalerAddress", "caCert", "tlsCertFile", "tlsClientCert", "tlsClientKey", "unsafeSsl", "enableTLS"}
)
"""Metadata that KEDA reads itself and passes on all the same."""


def read_pool(metadata: Mapping[str, str]) -> PoolConfig:
    """Return the pool of a scaler's metadata. Raises InvalidInput with the name, the value and what may be there."""
    for name in metadata.keys() - KEYS.keys() - IGNORED:
        raise InvalidInput(f"scaler metadata {name[:MAX_TEXT]!r} is not known; there are {', '.join(KEYS)}")
    role, members = metadata.get("pool", ""), metadata.get("members", "")
    if role not in ROLES:
        raise InvalidInput(
            f"scaler metadata pool is {role[:MAX_TEXT]!r}; it has to be one of {', '.join(ROLES)}"
        )
    if len(members) > MAX_TEXT or not members.isprintable():
        raise InvalidInput(
            f"scaler metadata members is {members[:MAX_TEXT]!r}: not the begin of a member's name"
        )
    usual = Bounds()
    hold = metadata.get("holdSeconds", "")
    bounds = Bounds(
        least=_number(metadata, "minWorkers", int, usual.least, MOST_WORKERS),
        most=_number(metadata, "maxWorkers", int, usual.most, MOST_WORKERS),
        first=_number(metadata, "firstWorkers", int, usual.first, MOST_WORKERS),
        cold_start_s=_number(metadata, "coldStartSeconds", float, usual.cold_start_s, MOST_SECONDS),
        idle_s=_number(metadata, "idleSeconds", float, usual.idle_s, MOST_SECONDS),
        low_s=_number(metadata, "holdSeconds", float, 0.0, MOST_SECONDS) if hold else None,
    )
    if bounds.least > bounds.most or bounds.most < 1:
        raise InvalidInput(
            f"scaler metadata minWorkers is {bounds.least} and maxWorkers {bounds.most}: the largest size has to be 1 at least, and "
            "not below the smallest"
        )
    cost = _number(metadata, "costPerHour", float, 0.0, math.inf)
    return PoolConfig(role, members, bounds, cost)


def _number(
    metadata: Mapping[str, str], name: str, kind: Callable[[str], NumberT], usual: NumberT, most: float
) -> NumberT:
    text = metadata.get(name, "")
    if not text:
        return usual
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not math.isfinite(value) or not 0 <= value <= most:
        limit = "" if math.isinf(most) else f" to {most:g}"
        raise InvalidInput(
            f"scaler metadata {name} is {text[:MAX_TEXT]!r}; it has to be a number from 0{limit}"
        )
    return value

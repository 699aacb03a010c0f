"""Pools that are sized: a name, a role, the workers that belong to it, its bounds and its cost, as `--pool` says. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from paceline.errors import InvalidInput
from paceline.services.coordinator.scaling.policy import Bounds

ROLES = ("rollout", "reward", "environment")
MOST_WORKERS = 100_000
MOST_SECONDS = 86_400.0
MAX_TEXT = 128
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Names of pools, which are parts of URLs."""

NumberT = TypeVar("NumberT", int, float)


@dataclass(frozen=True)
class PoolConfig:
    """One pool."""

    role: str
    name: str
    """The role for a pool of all its workers."""
    members: str = ""
    """First characters of the member ids that belong to the pool; empty: all workers of the role."""
    bounds: Bounds = field(default_factory=Bounds)
    cost: float = 0.0
    """Cost of a worker for an hour, in any currency; 0: not named."""

    def has(self, role: str, member_id: str) -> bool:
        """Return whether a worker belongs to the pool."""
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
"""Settings of a pool (docs/scaling.md)."""


def read_pools(texts: Iterable[str]) -> tuple[PoolConfig, ...]:
    """Return the pools of `--pool`. Raises InvalidInput, also for two that have a name or workers in common."""
    pools: list[PoolConfig] = []
    for pool in map(read_pool, texts):
        for other in pools:
            if pool.name == other.name:
                raise InvalidInput(f"two pools have the name {pool.name!r}; give each another")
            overlaps = pool.members.startswith(other.members) or other.members.startswith(pool.members)
            if pool.role == other.role and overlaps:
                raise InvalidInput(
                    f"members {pool.members!r} of {pool.name} and {other.members!r} of {other.name} name the same {pool.role} "
                    "workers; give pools names of workers of which none begins with another"
                )
        pools.append(pool)
    return tuple(pools)


def read_pool(text: str) -> PoolConfig:
    """Return the pool of KEY=VALUE,KEY=VALUE. Raises InvalidInput with the name, the value and what may be there."""
    settings = _settings(text)
    role, members = settings.get("role", ""), settings.get("members", "")
    if role not in ROLES:
        raise InvalidInput(f"role is {role[:MAX_TEXT]!r}; it has to be one of {', '.join(ROLES)}")
    if len(members) > MAX_TEXT or not members.isprintable():
        raise InvalidInput(f"members is {members[:MAX_TEXT]!r}: not the begin of a member's name")
    name = settings.get("name", role)
    if NAME.fullmatch(name) is None or (name != role and (name in ROLES or not members)):
        raise InvalidInput(
            f"name is {name[:MAX_TEXT]!r}; it has to be that of the role, or, for a pool with members, letters, digits and ._-"
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
            f"minWorkers is {bounds.least} and maxWorkers {bounds.most}: the largest size has to be 1 at least, and not below the "
            "smallest"
        )
    cost = _number(settings, "costPerHour", float, 0.0, math.inf)
    return PoolConfig(role, name, members, bounds, cost)


def _settings(text: str) -> dict[str, str]:
    settings: dict[str, str] = {}
    for part in text.split(","):
        key, separator, value = part.partition("=")
        if key not in KEYS or not separator:
            raise InvalidInput(
                f"{part[:MAX_TEXT]!r} is no setting of a pool; there are {'=, '.join(KEYS)}=, with commas between them"
            )
        if key in settings:
            raise InvalidInput(f"{key} is there twice: {settings[key][:MAX_TEXT]!r} and {value[:MAX_TEXT]!r}")
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
        raise InvalidInput(f"{name} is {text[:MAX_TEXT]!r}; it has to be a number from 0{limit}")
    return value

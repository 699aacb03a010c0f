"""The chain of hosts along which a version travels: who reads from whom, and from whom instead when that one is dead.

A host sends every byte once, so the time for N hosts is that for one, plus one bucket's time for each hop (a chain of N
hops and B buckets takes 1 + (N - 1) / B times as long; a broadcast from one host takes N times as long). A small version is
bound by the hops' delays and not by bytes; it goes through a tree, whose inner hosts send several copies.

The promise: no order of upstreams leads in a circle, because a host reads only from hosts before it and from the learner's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from paceline.v1 import worker_pb2

FALLBACKS = 3
"""Hosts before the preferred upstream that are tried after it, ahead of the learner's hosts."""
TREE_BYTES = 2 << 20
"""Versions up to this size go through a tree."""
TREE_WIDTH = 8


class Hop(NamedTuple):
    """A host in the chain."""

    agent_id: str
    address: str
    zone: str = ""
    is_slow: bool = False


def ordered(hops: Iterable[Hop], source_zone: str) -> list[Hop]:
    """Return the hosts in the order of the chain: the learner's zone first, then zone by zone, so that a border is crossed
    once; within a zone hosts that were slow come last, where nobody waits for them. Otherwise the order stays.
    """
    given = list(hops)
    zones = list(dict.fromkeys(hop.zone for hop in given))
    zones.sort(key=lambda zone: zone != source_zone)
    return sorted(given, key=lambda hop: (zones.index(hop.zone), hop.is_slow))


def width(size_bytes: int) -> int:
    """Return how many hosts read from one host directly."""
    return TREE_WIDTH if size_bytes <= TREE_BYTES else 1


def parent(position: int, fan_out: int) -> int:
    """Return the position of the host that the one at `position` reads from; -1 for the learner's hosts.

    A chain for a fan-out of 1; else a tree whose first level reads from the learner.
    """
    return position - 1 if fan_out == 1 else position // fan_out - 1


def upstreams(position: int, hops: Sequence[Hop], sources: Sequence[str], size_bytes: int) -> list[worker_pb2.Upstream]:
    """Return where the host at `position` reads, in the order of preference: its parent, the parent's parent and so on, and
    the learner's hosts at the end."""
    fan_out = width(size_bytes)
    found: list[worker_pb2.Upstream] = []
    above = parent(position, fan_out)
    while above >= 0 and len(found) <= FALLBACKS:
        found.append(worker_pb2.Upstream(addresses=[hops[above].address]))
        above = parent(above, fan_out)
    return [*found, worker_pb2.Upstream(addresses=sources)]

"""Plans for the relay of each host: the host from which it reads the newest version, and other hosts if that is dead.

The coordinator keeps the newest version that the learner announced and the hosts of the roster in the order of the
chain. A member gets a plan only if the plan is new: for another version, for another roster that changes the hosts
before the member's host, or for a new stream. Nothing else is sent, and nothing here grows with the bytes.

A host sends every byte once, so N hosts take the time of one, plus one bucket's time for each hop (a chain of N hops
and B buckets takes 1 + (N - 1) / B times as long; a broadcast from one host takes N times as long). A small version is
bound by the hops' delays and not by bytes; it goes through a tree, whose inner hosts send several copies.

Promise: upstreams never form a cycle, because a host reads only from hosts before it and from the learner's.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from paceline.groups import Version
from paceline.services.coordinator.exchange.state import Exchange
from paceline.services.coordinator.members.registry import Member, Members
from paceline.services.coordinator.text_limits import seconds
from paceline.v1 import worker_pb2

FALLBACKS = 3
"""Largest number of hosts that are tried after the preferred upstream and before the learner's hosts."""
TREE_BYTES = 2 << 20
"""Largest number of bytes of a version that goes through a tree."""
TREE_WIDTH = 8


class Hop(NamedTuple):
    relay_id: str
    address: str
    zone: str = ""
    is_slow: bool = False


def ordered(hops: Iterable[Hop], source_zone: str) -> list[Hop]:
    """Return the hosts in the order of the chain: the learner's zone first, then zone by zone, so that each border is
    crossed once; within a zone slow hosts come last, where no host waits for them. Otherwise the order stays."""
    chain = list(hops)
    zones = list(dict.fromkeys(hop.zone for hop in chain))
    zones.sort(key=lambda zone: zone != source_zone)
    return sorted(chain, key=lambda hop: (zones.index(hop.zone), hop.is_slow))


def width(size_bytes: int) -> int:
    """Return the number of hosts that read from one host directly."""
    return TREE_WIDTH if size_bytes <= TREE_BYTES else 1


def parent(position: int, fan_out: int) -> int:
    """Return the position of the host that `position` reads from; -1 for the learner's hosts. With a fan-out of 1 the
    hosts form a chain, else a tree whose first level reads from the learner."""
    return position - 1 if fan_out == 1 else position // fan_out - 1


def upstreams(position: int, hops: Sequence[Hop], sources: Sequence[str], size_bytes: int) -> list[worker_pb2.Upstream]:
    """Return the upstreams of the host at `position` in the order of preference: its parent, the parent's parent and so
    on, and the learner's hosts last."""
    fan_out = width(size_bytes)
    hosts: list[worker_pb2.Upstream] = []
    above = parent(position, fan_out)
    while above >= 0 and len(hosts) <= FALLBACKS:
        hosts.append(worker_pb2.Upstream(addresses=[hops[above].address]))
        above = parent(above, fan_out)
    return [*hosts, worker_pb2.Upstream(addresses=sources)]


SLOW_SHARE = 1 / 3
"""Share of the median speed below which a host is slow."""
SLOW_VERSIONS = 2
"""Number of slow versions in a row after which a host goes to the end of the chain."""
FEWEST_HOSTS = 3
MAX_HOSTS = 4096
"""Largest number of hosts whose speeds are kept."""

log = logging.getLogger(__name__)


class HopSpeeds:
    """Speeds of hosts, measured by their relays. Pure bookkeeping."""

    def __init__(self) -> None:
        self._speeds: dict[str, float] = {}
        self._slow: dict[str, int] = {}
        """Number of slow versions in a row. The key is the relay id."""

    def note(self, transfer: worker_pb2.HostTransfer) -> bool:
        """Add a measurement; return whether the host has just become slow."""
        busy_s = seconds(transfer.seconds) - seconds(transfer.waited_s)
        if not transfer.received_bytes or not busy_s > 0:
            return False
        relay_id = transfer.agent_id
        self._speeds[relay_id] = transfer.received_bytes / busy_s
        while len(self._speeds) > MAX_HOSTS:
            self._slow.pop(next(iter(self._speeds)), None)
            del self._speeds[next(iter(self._speeds))]
        usual = statistics.median(self._speeds.values())
        is_slow = len(self._speeds) >= FEWEST_HOSTS and self._speeds[relay_id] < SLOW_SHARE * usual
        self._slow[relay_id] = min(self._slow.get(relay_id, 0) + 1, SLOW_VERSIONS + 1) if is_slow else 0
        return self._slow[relay_id] == SLOW_VERSIONS

    def is_slow(self, relay_id: str) -> bool:
        return self._slow.get(relay_id, 0) >= SLOW_VERSIONS


class HostPlans:
    """Plans of the active run; `learner` returns the member that announces versions."""

    def __init__(self, members: Members, exchange: Exchange, learner: Callable[[], Member | None]):
        self._members, self._exchange, self._learner = members, exchange, learner
        self._version: worker_pb2.HostVersion | None = None
        self.speeds = HopSpeeds()

    def take(self, version: worker_pb2.HostVersion, epoch: int, member_ids: Sequence[str]) -> None:
        """Set the newest version, and send the roster's members their plans for it."""
        self._version = version
        self.update(epoch, member_ids)

    def update(self, epoch: int, member_ids: Sequence[str]) -> None:
        """Send each member of the roster its plan, unless it has this plan already."""
        run, version = self._exchange.active, self._version
        if run is None or version is None or version.run_id != run.run_id:
            return
        members = [m for i in member_ids if (m := self._members.get(i)) is not None and m.host is not None]
        hops = self._hops(members, version)
        positions = {hop.relay_id: position for position, hop in enumerate(hops)}
        max_wait_s = run.spec.weights.max_wait_s
        for member in members:
            assert member.host is not None
            position = positions.get(member.host.agent_id)
            plan = worker_pb2.HostPlan(
                run_id=version.run_id,
                version=version.version,
                manifest_sha256=version.manifest_sha256,
                size_bytes=version.size_bytes,
                upstreams=(
                    [worker_pb2.Upstream(addresses=version.sources)]
                    if position is None
                    else upstreams(position, hops, version.sources, version.size_bytes)
                ),
                token=version.token,
                max_wait_s=max_wait_s,
                position=position or 0,
            )
            if plan == member.stream.host_plan:
                continue
            member.stream.host_plan = plan
            announced = Version(version.version.session, version.version.step)
            if announced not in member.weights.offered:
                member.weights.offered.append(announced)
            self._exchange.workers.offer(member.member_id, announced)
            sent = worker_pb2.HostPlan()
            sent.CopyFrom(plan)
            sent.epoch = epoch
            member.direct(worker_pb2.ConnectResponse(host_plan=sent))

    def note(self, member: Member, transfer: worker_pb2.HostTransfer) -> str:
        """Note how a host received a version; return a warning if the host has just become slow, else an empty text."""
        if member.host is None or member.host.agent_id != transfer.agent_id or not self.speeds.note(transfer):
            return ""
        speed = transfer.received_bytes / max(transfer.seconds - transfer.waited_s, 1e-9)
        return (
            f"the host of {member.member_id} receives weights at {speed / 1e6:.1f} MB/s, less than {SLOW_SHARE:.0%} of the "
            "median; from now on this host is last in the chain"
        )

    def _hops(self, members: Sequence[Member], version: worker_pb2.HostVersion) -> list[Hop]:
        sources = set(version.source_agent_ids)
        hosts = [member.host for member in members if member.host is not None]
        hops = {
            host.agent_id: Hop(host.agent_id, host.address, host.zone, self.speeds.is_slow(host.agent_id))
            for host in hosts
            if host.agent_id not in sources
        }
        learner = self._learner()
        zone = learner.host.zone if learner is not None and learner.host is not None else ""
        return ordered(hops.values(), zone)

"""Plans for hosts: where the agent of each host reads the newest version that the learner's hosts hold.

The coordinator keeps the newest version that the learner announced and the hosts of the roster in the order of the chain
(`paceline.weights.hosts.chain`). A member gets a plan when it is new: another version, another roster that changes what is before
its host, or a stream that was opened again. Nothing else is sent, and nothing here is proportional to the bytes.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence

from paceline.groups import Version
from paceline.services.coordinator.exchange.state import Exchange
from paceline.services.coordinator.members.registry import Member, Members
from paceline.v1 import worker_pb2
from paceline.weights.hosts.chain import Hop, ordered, upstreams

SLOW_SHARE = 1 / 3
"""Share of the usual bytes a second below which a host is slow."""
SLOW_VERSIONS = 2
"""Versions in a row in which a host has to be slow, so that it goes to the end of the chain."""
FEWEST_HOSTS = 3
MAX_HOSTS = 4096
"""Hosts whose speeds are remembered."""

log = logging.getLogger(__name__)


class HopSpeeds:
    """Speeds of hosts, from what their agents measured. Pure bookkeeping."""

    def __init__(self) -> None:
        self._speeds: dict[str, float] = {}
        self._slow: dict[str, int] = {}
        """Versions in a row in which a host was slow."""

    def note(self, transfer: worker_pb2.HostTransfer) -> bool:
        """Take a measurement; return whether the host has just become slow."""
        busy_s = transfer.seconds - transfer.waited_s
        if not transfer.received_bytes or not busy_s > 0:
            return False
        agent_id = transfer.agent_id
        self._speeds[agent_id] = transfer.received_bytes / busy_s
        while len(self._speeds) > MAX_HOSTS:
            self._slow.pop(next(iter(self._speeds)), None)
            del self._speeds[next(iter(self._speeds))]
        usual = statistics.median(self._speeds.values())
        is_slow = len(self._speeds) >= FEWEST_HOSTS and self._speeds[agent_id] < SLOW_SHARE * usual
        self._slow[agent_id] = min(self._slow.get(agent_id, 0) + 1, SLOW_VERSIONS + 1) if is_slow else 0
        return self._slow[agent_id] == SLOW_VERSIONS

    def is_slow(self, agent_id: str) -> bool:
        return self._slow.get(agent_id, 0) >= SLOW_VERSIONS


class HostPlans:
    """The plans of the active run; `learner` returns the member that announces versions."""

    def __init__(self, members: Members, exchange: Exchange, learner: Callable[[], Member | None]):
        self._members, self._exchange, self._learner = members, exchange, learner
        self._version: worker_pb2.HostVersion | None = None
        self.speeds = HopSpeeds()

    def take(self, version: worker_pb2.HostVersion, epoch: int, member_ids: Sequence[str]) -> None:
        """Take the newest version of the learner, and plan it for the roster's hosts."""
        self._version = version
        self.update(epoch, member_ids)

    def update(self, epoch: int, member_ids: Sequence[str]) -> None:
        """Send each member of the roster its plan, if it is another than it has."""
        run, version = self._exchange.active, self._version
        if run is None or version is None or version.run_id != run.run_id:
            return
        members = [m for i in member_ids if (m := self._members.get(i)) is not None and m.host is not None]
        hops = self._hops(members, version)
        positions = {hop.agent_id: position for position, hop in enumerate(hops)}
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
            if plan == member.host_plan:
                continue
            member.host_plan = plan
            announced = Version(version.version.session, version.version.step)
            if announced not in member.offered:
                member.offered.append(announced)
            self._exchange.offer(member.member_id, announced)
            sent = worker_pb2.HostPlan()
            sent.CopyFrom(plan)
            sent.epoch = epoch
            member.direct(worker_pb2.ConnectResponse(host_plan=sent))

    def note(self, member: Member, transfer: worker_pb2.HostTransfer) -> str:
        """Take how a host got a version; return a sentence for people when the host has become slow."""
        if member.host is None or member.host.agent_id != transfer.agent_id or not self.speeds.note(transfer):
            return ""
        speed = transfer.received_bytes / max(transfer.seconds - transfer.waited_s, 1e-9)
        return (
            f"the host of {member.member_id} receives weights at {speed / 1e6:.1f} MB/s, less than {SLOW_SHARE:.0%} of the "
            "usual; it is last in the chain from now on"
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

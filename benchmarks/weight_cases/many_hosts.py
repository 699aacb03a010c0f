"""Hundreds of thin hosts in one process: agents with links of a given rate, and the coordinator's real plans for them.

Each scenario brings one version to all hosts: undisturbed, with a change of the roster, with a host that dies, with one that joins in
the middle, and over two regions. Time and bytes stand against the formula: a chain of N hosts and B buckets takes
1 + (N - 1) / B times as long as one host, every host receives each byte once, and the learner's host sends it once.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
import time
from types import SimpleNamespace
from typing import Any

from paceline.groups import Version
from paceline.services.coordinator.members.registry import Member, Members
from paceline.services.coordinator.pool.host_plans import HostPlans
from paceline.v1 import common_pb2, worker_pb2
from paceline.weights.format.manifest import TensorPlan, WeightManifest
from paceline.weights.hosts.manifest import HostManifest, Owned, joined
from paceline.weights.hosts.relay import Relay
from paceline.weights.hosts.transport import Channel, Listener, Transport

RUN, TOKEN = "run", b"t" * 32
TIMEOUT_S = 300.0
STACK_BYTES = 256 << 10


class _Pacer:
    """The uplink of one host: bytes leave at a rate, in the order in which they came."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._lock, self._free_s = bytes_per_s, threading.Lock(), 0.0
        self.sent_bytes = 0

    def pass_on(self, size_bytes: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free_s = max(self._free_s, now) + size_bytes / self._bytes_per_s
            self.sent_bytes += size_bytes
            wait_s = self._free_s - now
        time.sleep(wait_s)


class _PacedChannel:
    def __init__(self, channel: Channel, pacer: _Pacer) -> None:
        self._channel, self._pacer, self.peer = channel, pacer, channel.peer
        self.receive_into, self.close = channel.receive_into, channel.close

    def send(self, data: bytes | memoryview) -> None:
        self._pacer.pass_on(len(data))
        self._channel.send(data)


class _PacedListener:
    def __init__(self, listener: Listener, pacer: _Pacer) -> None:
        self._listener, self._pacer = listener, pacer
        self.port, self.close = listener.port, listener.close

    def accept(self) -> Channel | None:
        channel = self._listener.accept()
        return None if channel is None else _PacedChannel(channel, self._pacer)


class PacedTransport(Transport):
    """TCP on loopback, whose listening side sends at a rate."""

    def __init__(self, bytes_per_s: float) -> None:
        self.pacer = _Pacer(bytes_per_s)

    def listen(self, host: str, port: int, timeout_s: float) -> Any:
        return _PacedListener(super().listen(host, port, timeout_s), self.pacer)


class Site:
    """A learner's host, many others, and the coordinator's plans."""

    def __init__(self, size_bytes: int, buckets: int, bytes_per_s: float) -> None:
        plans = [TensorPlan("weights", "uint8", (size_bytes,), None)]
        layout = WeightManifest.plan(plans, size_bytes // buckets)
        self.layout = HostManifest(RUN, Version(0, 0), layout, joined([Owned(0, size_bytes, 0)]), "xxh3_128")
        self._bytes_per_s = bytes_per_s
        self.members = Members(10.0)
        run = SimpleNamespace(run_id=RUN, spec=SimpleNamespace(weights=SimpleNamespace(max_wait_s=30.0)))
        exchange: Any = SimpleNamespace(active=run, offer=lambda *_: None)
        learner = Member("learner", common_pb2.ROLE_LEARNER, "", 0, 0.0)
        self.source, self.source_link = self._agent()
        learner.host = self._identity(self.source, "east")
        self.plans = HostPlans(self.members, exchange, lambda: learner)
        self.source.versions.use_run(RUN)
        self.source.sender.admit_readers_of(RUN, TOKEN)
        self.hosts: dict[str, tuple[Relay, PacedTransport]] = {}
        self.coordinator_s = 0.0
        """Processor time of planning and of the directives."""
        self._epoch = 0

    def add(self, zone: str = "east") -> str:
        """Return the id of the only worker of a new host."""
        agent, transport = self._agent()
        member = Member(f"w{len(self.hosts)}", common_pb2.ROLE_ROLLOUT, "", 0, 0.0)
        member.host = self._identity(agent, zone)
        self.members.add(member)
        self.hosts[member.member_id] = agent, transport
        return member.member_id

    def publish(self, step: int) -> worker_pb2.HostVersion:
        """Stage a version on the learner's host."""
        version = Version(1, step)
        held = self.source.versions.begin(self.layout, version, staged=True, wait_s=0.0)
        assert held is not None
        held.memory[:] = os.urandom(1 << 10) * (len(held.memory) >> 10)
        manifest = self.layout.of(version, tuple(self.source.hash_staged(held, self.layout, 0)))
        data = manifest.to_bytes()
        self.source.described(held, data)
        identity = self._identity(self.source, "east")
        return worker_pb2.HostVersion(
            run_id=RUN,
            version=common_pb2.PolicyVersion(session=1, step=step),
            manifest_sha256=hashlib.sha256(data).digest(),
            size_bytes=manifest.size_bytes,
            sources=[identity.address],
            source_agent_ids=[identity.agent_id],
            token=TOKEN,
        )

    async def plan(self, member_ids: list[str], version: worker_pb2.HostVersion | None = None) -> None:
        """Name these the roster, and bring the plans to their agents."""
        self._epoch += 1
        started_s = time.thread_time()
        if version is not None:
            self.plans.take(version, self._epoch, member_ids)
        else:
            self.plans.update(self._epoch, member_ids)
        directives = []
        for member_id in member_ids:
            member = self.members.get(member_id)
            assert member is not None
            while len(member.outbox):
                directive = await member.outbox.get()
                assert directive is not None
                directives.append((member_id, directive.SerializeToString()))
        self.coordinator_s += time.thread_time() - started_s
        for member_id, data in directives:
            self.hosts[member_id][0].take_plan(worker_pb2.ConnectResponse.FromString(data).host_plan)

    def wait(self, member_ids: list[str], step: int) -> float:
        """Wait until these hosts have the version; return how long that took from now."""
        started_s = time.monotonic()
        for member_id in member_ids:
            store = self.hosts[member_id][0].versions
            with store.changed:
                if not store.changed.wait_for(
                    lambda store=store: (n := store.newest_complete()) is not None and n.version.step >= step,
                    TIMEOUT_S,
                ):
                    raise TimeoutError(f"{member_id} has no version {step} after {TIMEOUT_S:.0f} s")
        return time.monotonic() - started_s

    def close(self) -> None:
        """End all agents."""
        for agent, _ in (*self.hosts.values(), (self.source, self.source_link)):
            agent.close()

    def _agent(self) -> tuple[Relay, PacedTransport]:
        transport = PacedTransport(self._bytes_per_s)
        # One process stands for hundreds: its threads wait for each other longer than a host's would.
        return Relay(transport, "127.0.0.1", streams=1, silence_s=10.0), transport

    def _identity(self, agent: Relay, zone: str) -> worker_pb2.HostAgent:
        return worker_pb2.HostAgent(agent_id=agent.agent_id, address=f"127.0.0.1:{agent.port}", zone=zone)


async def measure(num_hosts: int, size_bytes: int, buckets: int, bytes_per_s: float) -> dict[str, Any]:
    """Run all scenarios on one set of hosts."""
    threading.stack_size(STACK_BYTES)
    site = Site(size_bytes, buckets, bytes_per_s)
    one_s = size_bytes / bytes_per_s
    try:
        ids = [site.add("east" if number < num_hosts // 2 else "west") for number in range(num_hosts)]
        rows = {}
        for step, name in enumerate(("plain", "roster", "dead", "join"), 1):
            before = site.source_link.pacer.sent_bytes
            await site.plan(ids, site.publish(step))
            started_s = time.monotonic()
            if name != "plain":
                site.wait(ids[: num_hosts // 4], step)  # in the middle of the transfer
            if name == "roster":
                ids = [i for i in ids if i != ids[num_hosts // 2]]
                await site.plan(ids)
            elif name == "dead":
                dead = ids[num_hosts // 2]
                site.hosts[dead][0].close()
                ids = [i for i in ids if i != dead]  # nobody has told the others yet
            elif name == "join":
                ids = [*ids, site.add("west")]
                await site.plan(ids)
            site.wait(ids, step)
            seconds = time.monotonic() - started_s
            formula_s = one_s * (1 + (len(ids) - 1) / buckets)
            rows[name] = {
                "hosts": len(ids),
                "seconds": round(seconds, 2),
                "over_formula": round(seconds / formula_s, 3),
                "learner_copies": round((site.source_link.pacer.sent_bytes - before) / size_bytes, 3),
            }
            if name == "dead":
                await site.plan(ids)
        crossings = sum(1 for a, b in itertools.pairwise(ids) if _zone(site, a) != _zone(site, b))
        versions_s = sum(row["seconds"] for row in rows.values())
        return {
            "hosts": num_hosts,
            "bytes": size_bytes,
            "buckets": buckets,
            "one_host_s": round(one_s, 2),
            "scenarios": rows,
            "region_crossings": crossings,
            "coordinator_s_per_version": round(site.coordinator_s / len(rows), 4),
            "coordinator_share_of_a_core": round(site.coordinator_s / versions_s, 5),
        }
    finally:
        site.close()


def _zone(site: Site, member_id: str) -> str:
    member = site.members.get(member_id)
    assert member is not None
    assert member.host is not None
    return member.host.zone

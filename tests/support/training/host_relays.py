"""Hosts in one process: relays that speak TCP on loopback, and a learner's host that stages versions of a few kilobytes."""

from __future__ import annotations

import hashlib
import os
import queue
import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

from paceline.groups import Version
from paceline.v1 import common_pb2, host_agent_pb2, worker_pb2
from paceline.weights.format.manifest import TensorPlan, WeightManifest
from paceline.weights.hosts.local_socket import LocalConnection
from paceline.weights.hosts.manifest import HostManifest, Owned, PieceAlgorithm, joined
from paceline.weights.hosts.relay import Relay
from paceline.weights.hosts.segment import HostSegment
from paceline.weights.hosts.transport import Transport

RUN, TOKEN = "run", b"t" * 32
WAIT_S = 60.0
FoundT = TypeVar("FoundT")


def layout(
    tensors: int = 4,
    elements: int = 1000,
    bucket_bytes: int = 512,
    hosts: int = 1,
    algorithm: PieceAlgorithm = "xxh3_128",
) -> HostManifest:
    """Tensors of bytes, whose rows the learner's hosts share."""
    plans = [TensorPlan(f"t{i}", "uint8", (elements,), None) for i in range(tensors)]
    whole = WeightManifest.plan(plans, bucket_bytes)
    part = -(-elements // hosts)
    owned = [
        Owned(e.offset + i * part, e.offset + min((i + 1) * part, elements), i)
        for e in whole.entries
        for i in range(hosts)
    ]
    return HostManifest(RUN, Version(0, 0), whole, joined(owned), algorithm)


def content(version: Version, size_bytes: int) -> bytes:
    """Bytes that belong to one version only."""
    seed = hashlib.sha256(repr(tuple(version)).encode()).digest()
    return (seed * (size_bytes // len(seed) + 1))[:size_bytes]


class LocalClient:
    """A worker or a rank of a relay's host, without a process."""

    def __init__(self, relay: Relay) -> None:
        ours, theirs = socket.socketpair()
        self.connection = LocalConnection(ours)
        relay.serve(LocalConnection(theirs))

    def send(self, **request: object) -> None:
        """Send one request, by the name of its field."""
        self.connection.send(host_agent_pb2.AgentRequest(**request))  # type: ignore[arg-type]

    def reply(
        self, found: Callable[[host_agent_pb2.AgentReply], bool]
    ) -> tuple[host_agent_pb2.AgentReply, HostSegment | None]:
        """Return the first reply for which `found` is true, and the segment that came with it."""
        while True:
            received = self.connection.receive(host_agent_pb2.AgentReply, WAIT_S)
            assert received is not None, "no such reply"
            reply, fd = received
            segment = HostSegment.attach(fd) if fd is not None else None
            if fd is not None:
                os.close(fd)
            if found(reply):
                return reply, segment

    def complete(self, version: Version) -> tuple[host_agent_pb2.HeldVersion, HostSegment]:
        """Wait until the host has all of a version."""
        reply, segment = self.reply(lambda reply: reply.held.complete and numbers(reply.held) == version)
        assert segment is not None
        return reply.held, segment


class LearnerHost:
    """The relays of the learner's hosts, each with one rank that stages its part."""

    def __init__(self, manifest: HostManifest, transport: Transport | None = None) -> None:
        self.manifest = manifest
        self.relays = [Relay(transport or Transport(), "127.0.0.1") for _ in range(manifest.sources)]
        self.clients = [LocalClient(relay) for relay in self.relays]
        for source, client in enumerate(self.clients):
            client.send(
                layout=host_agent_pb2.StageLayout(
                    run_id=RUN, manifest=manifest.to_bytes(), source=source, local_ranks=1, token=TOKEN
                )
            )

    def stage(self, version: Version) -> worker_pb2.HostVersion:
        """Stage a version on all hosts, and return what the coordinator would be told."""
        data = content(version, self.manifest.layout.total_bytes)
        digests: dict[int, list[bytes]] = {}
        for source, client in enumerate(self.clients):
            client.send(begin=host_agent_pb2.StageBegin(run_id=RUN, version=message(version)))
            _, segment = client.reply(lambda reply: reply.WhichOneof("reply") == "buffer")
            assert segment is not None
            for one in self.manifest.owned:
                if one.source == source:
                    segment.memory()[one.begin : one.end] = data[one.begin : one.end]
            client.send(end=host_agent_pb2.StageEnd(run_id=RUN, version=message(version)))
            reply, _ = client.reply(lambda reply: reply.WhichOneof("reply") == "staged")
            digests[source] = list(reply.staged.digests)
        iterators = {source: iter(of_source) for source, of_source in digests.items()}
        manifest = self.manifest.of(version, tuple(next(iterators[p.source]) for p in self.manifest.pieces)).to_bytes()
        self.clients[0].send(
            manifest=host_agent_pb2.StageManifest(run_id=RUN, version=message(version), manifest=manifest)
        )
        return worker_pb2.HostVersion(
            run_id=RUN,
            version=message(version),
            manifest_sha256=hashlib.sha256(manifest).digest(),
            size_bytes=self.manifest.size_bytes,
            sources=[address(relay) for relay in self.relays],
            source_agent_ids=[relay.agent_id for relay in self.relays],
            token=TOKEN,
        )

    def close(self) -> None:
        for client in self.clients:
            client.connection.close()
        for relay in self.relays:
            relay.close()


def plan(version: worker_pb2.HostVersion, *upstreams: Sequence[str], position: int = 0) -> worker_pb2.HostPlan:
    """Return the plan of a host that reads from these, and from the learner's hosts at last."""
    return worker_pb2.HostPlan(
        run_id=version.run_id,
        version=version.version,
        manifest_sha256=version.manifest_sha256,
        size_bytes=version.size_bytes,
        upstreams=[worker_pb2.Upstream(addresses=one) for one in (*upstreams, version.sources)],
        token=version.token,
        position=position,
        max_wait_s=WAIT_S,
    )


def address(relay: Relay) -> str:
    """The address at which other hosts read."""
    return f"127.0.0.1:{relay.port}"


def numbers(held: host_agent_pb2.HeldVersion) -> Version:
    return Version(held.version.session, held.version.step)


def message(version: Version) -> common_pb2.PolicyVersion:
    return common_pb2.PolicyVersion(session=version.session, step=version.step)


def drained(found: queue.Queue[FoundT]) -> list[FoundT]:
    """Return what a queue holds now."""
    return [found.get_nowait() for _ in range(found.qsize())]

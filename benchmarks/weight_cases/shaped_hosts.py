"""Hosts as network namespaces on one bridge, each with a link of a given rate in both directions, and an agent for weights in each.

The driver talks to every agent over its Unix socket, as the workers of that host would. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.groups import Version
from paceline.services.coordinator.pool.host_plans import Hop, upstreams
from paceline.v1 import common_pb2, host_agent_pb2, worker_pb2
from paceline.weights.format.manifest import TensorPlan, WeightManifest
from paceline.weights.hosts.client import RelayClient
from paceline.weights.hosts.manifest import HostManifest, Owned, bucket_bytes_for, joined
from paceline.weights.hosts.segment import HostSegment

ROOT = Path(__file__).resolve().parents[2]
RUN = "run"
TOKEN = b"t" * 32
START_S = 30.0


def missing() -> str:
    """Return what this machine lacks for such hosts; empty if nothing."""
    if os.geteuid() != 0:
        return "it needs root"
    lacking = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if lacking:
        return f"it needs the program {' and '.join(lacking)}"
    try:
        with Bridge() as bridge:
            bridge.namespace(mbit=100.0)
    except (subprocess.CalledProcessError, OSError) as error:
        return f"the kernel refuses shaped links: {getattr(error, 'stderr', '') or error}"
    return ""


class Bridge:
    """A bridge, and the namespaces that are joined to it."""

    def __init__(self) -> None:
        taken = _run("ip", "-o", "addr")
        self._number = next(n for n in range(1, 255) if f"10.88.{n}." not in taken)
        self._device = f"pl{self._number}br"
        self._namespaces: list[str] = []

    def __enter__(self) -> Bridge:
        _run("ip", "link", "add", self._device, "type", "bridge")
        _run("ip", "link", "set", self._device, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._namespaces:
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", name)
        with contextlib.suppress(subprocess.CalledProcessError):
            _run("ip", "link", "del", self._device)

    def namespace(self, mbit: float) -> tuple[str, str]:
        """Return name and address of a new namespace whose link carries `mbit` Mbit/s in each direction."""
        place = len(self._namespaces) + 1
        name, outer = f"pl{self._number}x{place}", f"pl{self._number}v{place}"
        address = f"10.88.{self._number}.{place}"
        _run("ip", "netns", "add", name)
        self._namespaces.append(name)
        _run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "link", "set", outer, "master", self._device, "up")
        inside = ("ip", "netns", "exec", name)
        _run(*inside, "ip", "addr", "add", f"{address}/24", "dev", "eth0")
        _run(*inside, "ip", "link", "set", "eth0", "up")
        _run(*inside, "ip", "link", "set", "lo", "up")
        shape = ("root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms")
        _run("tc", "qdisc", "add", "dev", outer, *shape)  # towards the host
        _run(*inside, "tc", "qdisc", "add", "dev", "eth0", *shape)  # from the host
        return name, address


class AgentHost:
    """A host with its agent. `folder` has its socket and its log."""

    def __init__(self, folder: Path, namespace: str, address: str) -> None:
        self.namespace, self.address = namespace, address
        socket = folder / f"{namespace}.sock"
        environment = os.environ | {"PACELINE_INSECURE": "1", "PYTHONPATH": str(ROOT)}
        with (folder / f"{namespace}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(
                        "ip",
                        "netns",
                        "exec",
                        namespace,
                        sys.executable,
                        "-m",
                        "paceline.services.host_agent.main",
                    ),
                    *("--socket", str(socket), "--host", address, "--stay"),
                ],
                env=environment,
                stdout=log,
                stderr=log,
            )
        deadline_s = time.monotonic() + START_S
        while not socket.exists():
            if time.monotonic() > deadline_s or self.process.poll() is not None:
                raise RuntimeError(f"the agent of {namespace} does not start; see {folder}/{namespace}.log")
            time.sleep(0.02)
        self.replies: queue.Queue[tuple[host_agent_pb2.AgentReply, int | None]] = queue.Queue()
        self.client = RelayClient(str(socket), address, address)
        self.client.on_reply = lambda reply, fd: self.replies.put((reply, fd))
        self.client.start()
        if not self.client.wait(START_S):
            raise RuntimeError(f"the agent of {namespace} is not reached")

    @property
    def hop(self) -> Hop:
        """The host as a part of the chain."""
        identity = self.client.identity
        assert identity is not None
        return Hop(identity.agent_id, identity.address, identity.zone)

    def signal(self, number: signal.Signals) -> None:
        """Send the agent a signal; before a deadly one, leave it, so that no other is started in its place."""
        if number == signal.SIGKILL:
            self.client.close()
        self.process.send_signal(number)

    def complete(self, version: Version, timeout_s: float) -> host_agent_pb2.HeldVersion:
        """Wait until the host has all of a version. Raises queue.Empty."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            reply, fd = self.replies.get(timeout=max(0.0, deadline_s - time.monotonic()))
            if fd is not None:
                os.close(fd)
            held = reply.held
            if held.complete and Version(held.version.session, held.version.step) == version:
                return held

    def end(self) -> None:
        """End the agent."""
        self.client.close()
        self.process.kill()
        self.process.wait()


class Source:
    """The learner's host: versions of `size_bytes` bytes, staged by one rank."""

    def __init__(self, host: AgentHost, size_bytes: int) -> None:
        self.host = host
        plans = [TensorPlan(f"t{i}", "uint8", (size_bytes // 8,), None) for i in range(8)]
        layout = WeightManifest.plan(plans, bucket_bytes_for(size_bytes))
        owned = joined(Owned(e.offset, e.offset + e.num_bytes, 0) for e in layout.entries)
        self.layout = HostManifest(RUN, Version(0, 0), layout, owned, "sha256")
        stage = host_agent_pb2.StageLayout(run_id=RUN, manifest=self.layout.to_bytes(), local_ranks=1, token=TOKEN)
        host.client.send(host_agent_pb2.AgentRequest(layout=stage))

    def stage(self, version: Version) -> worker_pb2.HostVersion:
        """Stage a version of noise, and return what the learner would tell the coordinator."""
        number = common_pb2.PolicyVersion(session=version.session, step=version.step)
        self._ask(host_agent_pb2.AgentRequest(begin=host_agent_pb2.StageBegin(run_id=RUN, version=number)))
        _, fd = self.host.replies.get(timeout=START_S)
        assert fd is not None
        segment = HostSegment.attach(fd)
        os.close(fd)
        noise = os.urandom(1 << 20)
        memory = segment.memory()
        for begin in range(0, len(memory), len(noise)):
            memory[begin : begin + len(noise)] = noise[: len(memory) - begin]
        self._ask(host_agent_pb2.AgentRequest(end=host_agent_pb2.StageEnd(run_id=RUN, version=number)))
        reply, _ = self.host.replies.get(timeout=START_S)
        manifest = self.layout.of(version, tuple(reply.staged.digests)).to_bytes()
        described = host_agent_pb2.StageManifest(run_id=RUN, version=number, manifest=manifest)
        self._ask(host_agent_pb2.AgentRequest(manifest=described))
        return worker_pb2.HostVersion(
            run_id=RUN,
            version=number,
            manifest_sha256=hashlib.sha256(manifest).digest(),
            size_bytes=self.layout.size_bytes,
            sources=[self.host.hop.address],
            token=TOKEN,
        )

    def _ask(self, request: host_agent_pb2.AgentRequest) -> None:
        self.host.client.send(request)


def send_plans(version: worker_pb2.HostVersion, hosts: Sequence[AgentHost], chained: bool = True) -> None:
    """Tell each host where to read: along the chain, or all from the source."""
    hops = [host.hop for host in hosts]
    for position, host in enumerate(hosts):
        plan = worker_pb2.HostPlan(
            run_id=RUN,
            version=version.version,
            manifest_sha256=version.manifest_sha256,
            size_bytes=version.size_bytes,
            upstreams=upstreams(position if chained else 0, hops, version.sources, version.size_bytes),
            token=version.token,
            position=position,
        )
        host.client.send(host_agent_pb2.AgentRequest(plan=plan))


def _run(*command: str) -> str:
    return subprocess.run(command, text=True, capture_output=True, timeout=60, check=True).stdout

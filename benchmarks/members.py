"""Many members on one coordinator: a real coordinator process, thin members in this one, no model.

    python benchmarks/members.py [--members 1000] [--ranks 512] [--files 1024] [--json]

A thin member keeps what a worker keeps, a control stream on a connection of its own and a DEALER socket, and says what a
worker says: hello, ready, acknowledgements, a heartbeat a second. The coordinator starts with a soft limit of `--files`
open files. Printed, seconds and the coordinator's processor time of each phase:

  joins    all members and ranks join; until the learner has heard of an epoch with all of them
  offers   the learner offers a version to every member and each acknowledges; until it has heard of all
  parked   every member's request for leases waits; the coordinator's processor time for a second of it
  back     the coordinator is killed (SIGKILL) and started again; from then until every member is one again, and the
           learner has heard of an epoch with all of them
  goes_on  until a lease was given in the new term, and a version offered to every member and acknowledged
  drains   half of the members leave in good order; until the learner has heard of an epoch without them
  breaks   the connections of the other half break; until the learner has heard of an epoch of nobody

With --json the last line is one object; `served` is the number of members that were named in an epoch, `back_after_s` the
seconds of `back`, `coordinator_mb` the most resident memory of the coordinator's processes in any phase, in 10⁶ bytes. The
load is this process, with a core of its own where there are two: `load_cpu_s` is its processor time in `back`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import grpc
import psutil
import zmq
import zmq.asyncio

from paceline.calls.backoff import ExponentialBackoff
from paceline.calls.proof import AioProver
from paceline.calls.token import known_token
from paceline.client import Client
from paceline.services.common.worker.membership import CONNECT, FIRST_BACKOFF_S, MAX_BACKOFF_S
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection, RunSpec
from paceline.spec.reading import parse_spec
from paceline.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import PROTOCOL

DEADLINE_S = 300.0
"""Seconds that each phase may take."""

PARKED_S = 5.0
JOINING_AT_ONCE = 64
BEAT_S = 1.0
OFFER_AGAIN_S = 5.0


class Thin:
    """One member: its stream and, for a rollout worker, its socket."""

    def __init__(self, address: str, role: common_pb2.Role.ValueType, member_id: str, **hello: Any):
        self.member_id = member_id
        self.named: frozenset[str] = frozenset()
        """Learner: members of the newest epoch."""
        self.acks: set[tuple[str, int]] = set()
        """Learner: members that acknowledged, and the step of what."""
        self.directives = 0
        self.changed = asyncio.Event()
        self.welcomed = asyncio.Event()
        self._hello = worker_pb2.Hello(role=role, member_id=member_id, protocol=PROTOCOL, **hello)
        self._reports: asyncio.Queue[worker_pb2.ConnectRequest | None] = asyncio.Queue()
        # Channels with the same options would share a connection.
        self._channel = grpc.aio.insecure_channel(address, options=[("paceline.member", member_id)])
        self._address = address
        self._run = worker_pb2.RunAssignment()
        self._welcome = worker_pb2.Welcome()
        self._socket: zmq.asyncio.Socket | None = None
        self._context: zmq.asyncio.Context | None = None
        self.leases = 0
        """Leases since it last connected."""
        self._listening: asyncio.Task[None] | None = None
        self._ended = False
        self._task = asyncio.create_task(self._belong())

    @property
    def term(self) -> int:
        """The coordinator's life that it belongs to; 0 while it belongs to none."""
        return self._welcome.term

    @property
    def session(self) -> int:
        """Learner: the one that it was given."""
        return self._run.session

    def say(self, **report: Any) -> None:
        """Queue a report."""
        self._reports.put_nowait(worker_pb2.ConnectRequest(**report))

    def offer(self, member_id: str, step: int) -> None:
        """Learner: offers a version."""
        offer = worker_pb2.WeightOffer(run_id=self._run.run_id, member_id=member_id)
        offer.version.session, offer.version.step = self._run.session, step
        self.say(weight_offer=offer)

    async def park(self, context: zmq.asyncio.Context) -> None:
        """Send a request for leases that waits; with every later Welcome again, as a worker does."""
        self._context = context
        self._close_socket()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(self._welcome.exchange_endpoint)
        request = pb.ExchangeRequest(
            protocol=PROTOCOL,
            request_id=1,
            term=self._welcome.term,
            member_id=self.member_id,
            run_id=self._run.run_id,
            secret=self._welcome.secret,
            lease=pb.LeaseRequest(room=8, wait_s=60.0, held=pb.Held()),
        )
        await self._socket.send(request.SerializeToString())
        self._listening = asyncio.create_task(self._listen(self._socket))

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            self.leases += len(pb.ExchangeReply.FromString(frames[0]).lease.leases)

    def _close_socket(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
        if self._socket is not None:
            self._socket.close()
        self._listening = self._socket = None

    async def end(self) -> None:
        """Breaks the connections."""
        self._ended = True  # gRPC may turn the cancellation of a call into its status
        self._task.cancel()
        await asyncio.wait((self._task,))
        await self._channel.close()
        self._close_socket()

    async def _belong(self) -> None:
        """Keep a stream, with a worker's pauses between two attempts."""
        backoff = ExponentialBackoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        while not self._ended:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._stream(backoff)
            self._welcome.Clear()
            self.named = frozenset()
            if self._ended:
                return
            await asyncio.sleep(backoff.next_s() * random.uniform(0.5, 1.0))

    async def _stream(self, backoff: ExponentialBackoff) -> None:
        stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._reports = asyncio.Queue()  # what reads the one of the stream before may still wait for a report
        speaking = self._speak(self._reports)
        signed = await AioProver(self._channel, self._address, known_token(self._address)).sign(CONNECT)
        async for directive in stub.Connect(speaking, metadata=signed.metadata):
            self.directives += 1
            match directive.WhichOneof("directive"):
                case "welcome":
                    backoff.reset()
                    self._welcome.CopyFrom(directive.welcome)
                    self._hello.secret, self.leases = directive.welcome.secret, 0
                    self.welcomed.set()
                    if self._run.run_id:  # as a worker does that is back
                        self._report_ready()
                    if self._context is not None:
                        await self.park(self._context)
                case "run":
                    self._run = directive.run
                    self._hello.run_id, self._hello.session = self._run.run_id, self._run.session
                    self._report_ready()
                case "weight_offer":
                    ack = worker_pb2.WeightAck(run_id=self._run.run_id, member_id=self.member_id, ok=True)
                    ack.version.CopyFrom(directive.weight_offer.version)
                    self._hello.version.CopyFrom(ack.version)
                    self.say(weight_ack=ack)
                case "epoch":
                    self.named = frozenset(directive.epoch.member_ids)
                    self.changed.set()
                case "weight_acks":
                    self.acks |= {(ack.member_id, ack.version.step) for ack in directive.weight_acks.acks}
                    self.changed.set()

    def _report_ready(self) -> None:
        self.say(run_report=worker_pb2.RunReport(run_id=self._run.run_id, session=self._run.session))

    async def _speak(
        self, reports: asyncio.Queue[worker_pb2.ConnectRequest | None]
    ) -> AsyncIterator[worker_pb2.ConnectRequest]:
        yield worker_pb2.ConnectRequest(hello=self._hello)
        while True:
            try:
                async with asyncio.timeout(BEAT_S):
                    report = await reports.get()
            except TimeoutError:
                report = worker_pb2.ConnectRequest(heartbeat=worker_pb2.Heartbeat())
            if report is None:
                return
            yield report


class Phases:
    """Measurements by phase."""

    def __init__(self, cluster: LocalCluster):
        self.figures: dict[str, float] = {}
        self.coordinator = psutil.Process(cluster.pids("coordinator")[0])
        self.largest_bytes = 0
        """Most resident memory of the coordinator's processes, sampled every half second."""

    async def measure(self, name: str, work: Awaitable[None]) -> None:
        """Seconds of `work`, and the coordinator's processor time meanwhile."""
        started_s, before_s = time.perf_counter(), self._cpu_s()
        sampling = asyncio.create_task(self._sample())
        async with asyncio.timeout(DEADLINE_S):
            await work
        sampling.cancel()
        self.figures[f"{name}_s"] = round(time.perf_counter() - started_s, 2)
        self.figures[f"{name}_cpu_s"] = round(self._cpu_s() - before_s, 2)
        print(f"{name}: {self.figures[f'{name}_s']} s", file=sys.stderr, flush=True)

    async def _sample(self) -> None:
        while True:
            with contextlib.suppress(psutil.Error):
                processes = [self.coordinator, *self.coordinator.children(recursive=True)]
                self.largest_bytes = max(self.largest_bytes, sum(p.memory_info().rss for p in processes))
            await asyncio.sleep(0.5)

    def _cpu_s(self) -> float:
        times = self.coordinator.cpu_times()
        return float(times.user + times.system)


async def restarted(cluster: LocalCluster) -> tuple[psutil.Process, float]:
    """Kill the coordinator; return its next process and the time at which that was seen."""
    before = cluster.pids("coordinator")[0]
    cluster.kill("coordinator")
    while (pid := cluster.pids("coordinator").get(0)) in (None, before):  # noqa: ASYNC110 - a process has no event
        await asyncio.sleep(0.02)
    return psutil.Process(pid), time.perf_counter()


async def measure(address: str, cluster: LocalCluster, members: int, ranks: int) -> dict[str, Any]:
    """All phases on a coordinator that has a run."""
    phases, context = Phases(cluster), zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, 4 * members + 64)  # those of the term before close in the background
    learner = Thin(address, common_pb2.ROLE_LEARNER, "learner-rank0", world_size=ranks)
    await learner.welcomed.wait()
    others: list[Thin] = []
    thin: list[Thin] = []

    async def heard(done: Any) -> None:
        while not done():
            learner.changed.clear()
            await learner.changed.wait()

    async def join() -> None:
        for rank in range(1, ranks):
            hello = {"world_size": ranks, "rank": rank}
            others.append(Thin(address, common_pb2.ROLE_LEARNER, f"learner-rank{rank}", **hello))
        for first in range(0, members, JOINING_AT_ONCE):
            some = [
                Thin(address, common_pb2.ROLE_ROLLOUT, f"rollout-{number}")
                for number in range(first, min(first + JOINING_AT_ONCE, members))
            ]
            thin.extend(some)
            await asyncio.gather(*(one.welcomed.wait() for one in some))
        await asyncio.gather(*(one.welcomed.wait() for one in others))
        await heard(lambda: len(learner.named) == members)

    async def offer() -> None:
        for one in thin:
            learner.offer(one.member_id, 0)
        await heard(lambda: len(learner.acks) == members)

    async def park() -> None:
        await asyncio.gather(*(one.park(context) for one in thin))
        await asyncio.sleep(PARKED_S)

    async def come_back(term: int) -> None:
        while min(one.term for one in (learner, *others, *thin)) <= term:  # noqa: ASYNC110 - of a thousand
            await asyncio.sleep(0.05)
        await heard(lambda: len(learner.named) == members)

    async def go_on() -> None:
        learner.acks.clear()
        while missing := [one for one in thin if (one.member_id, 0) not in learner.acks]:
            for one in missing:  # a learner offers again what nobody acknowledges
                learner.offer(one.member_id, 0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(OFFER_AGAIN_S):
                    await heard(lambda: len(learner.acks) == members)
        while not any(one.leases for one in thin):  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def drain() -> None:
        for one in thin[: members // 2]:
            one.say(leave=worker_pb2.Leave())
        await heard(lambda: len(learner.named) == members - members // 2)

    async def part() -> None:
        await asyncio.gather(*(one.end() for one in thin[members // 2 :]))
        await heard(lambda: not learner.named)

    before = learner.directives
    await phases.measure("joins", join())
    served = len(learner.named)
    await phases.measure("offers", offer())
    told = learner.directives - before + sum(one.directives for one in others)
    await phases.measure("parked", park())
    term, load_s = learner.term, time.process_time()
    phases.coordinator, started_s = await restarted(cluster)
    await phases.measure("back", come_back(term))
    phases.figures["back_after_s"] = round(time.perf_counter() - started_s, 2)
    phases.figures["load_cpu_s"] = round(time.process_time() - load_s, 2)
    await phases.measure("goes_on", go_on())
    await phases.measure("drains", drain())
    await phases.measure("breaks", part())
    await asyncio.gather(*(one.end() for one in [learner, *others, *thin[: members // 2]]))
    context.destroy(linger=0)
    figures = {"members": members, "ranks": ranks, "served": served, "directives_to_ranks": told}
    figures["coordinator_mb"] = round(phases.largest_bytes / 1e6)
    return figures | phases.figures | {"session": learner.session}


def make_spec(folder: Path) -> RunSpec:
    """Return a run that gives out no lease for long: two groups for a thousand workers."""
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps({"prompt": str(i), "answer": str(i)}) + "\n" for i in range(100)))
    return parse_spec(
        {
            "policy": {"model_name": "none", "max_total_sequence_length": 1000},
            "data": {"train": str(data)},
            "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 100},
            "rewards": [{"function": "exact_match"}],
            "logger": {"tensorboard": False},
        }
    )


def main() -> None:
    """All phases, then the figures."""
    from short_form import parse  # the folder of a script is on the path

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1000, help="thin rollout workers")
    parser.add_argument("--ranks", type=int, default=512, help="of the learner; the first is the one that is told")
    parser.add_argument("--files", type=int, default=1024, help="the coordinator's soft limit of open files")
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    options = parse(parser, members=20, ranks=4)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster = LocalCluster(folder / "runs", ClusterSection())
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(options.files, soft), hard))
            address = cluster.start_coordinator()
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            with Client(address) as client:
                client.submit(make_spec(folder))
            figures = asyncio.run(measure(address, cluster, options.members, options.ranks))
        finally:
            cluster.stop()
    for label, value in figures.items():
        print(f"{label:24}{value}")
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()

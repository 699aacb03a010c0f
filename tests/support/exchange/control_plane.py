"""A coordinator with its control plane on a free port, and workers that speak to it over real streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from exchange_drivers import make_spec

from paceline.services.common.processes.starting import Capacity
from paceline.services.common.serving.grpc_server import GrpcServer
from paceline.services.coordinator.bundle_servicer import BundleServicer
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.lifecycle.coordinator import Coordinator
from paceline.services.coordinator.members.registry import Members
from paceline.services.coordinator.records.servicer import RecordsServicer
from paceline.services.coordinator.servicers import RunServicer, WorkerServicer
from paceline.spec.reading import spec_to_yaml
from paceline.v1 import (
    bundle_pb2_grpc,
    common_pb2,
    records_pb2_grpc,
    run_pb2,
    run_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from paceline.wire import PROTOCOL

DEADLINE_S = 60.0
TICK_S = 0.05


class Plane:
    """A coordinator with its control plane on a free port, as serving.py wires it; its loops run on request."""

    def __init__(self, directory: Path, timeout_s: float = 60.0, capacity: Capacity | None = None):
        self.directory = directory
        self.ledger = Ledger(directory / "ledger.sqlite")
        self.coordinator = Coordinator(self.ledger, directory, Members(timeout_s), "127.0.0.1", 0, tick_s=TICK_S)
        self.server = GrpcServer("127.0.0.1", 0)
        runs, workers = (
            RunServicer(self.coordinator),
            WorkerServicer(self.coordinator, "tcp://127.0.0.1:1", capacity),
        )
        self.server.add(runs, run_pb2_grpc.add_RunServiceServicer_to_server, "paceline.v1.RunService")
        self.server.add(workers, worker_pb2_grpc.add_WorkerServiceServicer_to_server, "paceline.v1.WorkerService")
        self.server.add(
            BundleServicer(self.coordinator.blobs),
            bundle_pb2_grpc.add_BundleServiceServicer_to_server,
            "paceline.v1.BundleService",
        )
        self.records_servicer = RecordsServicer(self.ledger.path, self.coordinator.members, self.coordinator.committed)
        self.server.add(
            self.records_servicer,
            records_pb2_grpc.add_RecordsServiceServicer_to_server,
            "paceline.v1.RecordsService",
        )
        self._loops: list[asyncio.Task[None]] = []

    @classmethod
    async def started(cls, directory: Path, timeout_s: float = 60.0, capacity: Capacity | None = None) -> Plane:
        """Return a plane that listens."""
        plane = cls(directory, timeout_s, capacity)
        await plane.start()
        return plane

    async def start(self) -> None:
        """Recover, then listen."""
        await self.coordinator.runs.recover()
        await self.server.start()
        self.coordinator.pool.expect_holders()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.server.port}")
        self.runs = run_pb2_grpc.RunServiceStub(self.channel)
        self.workers = worker_pb2_grpc.WorkerServiceStub(self.channel)
        self.records = records_pb2_grpc.RecordsServiceStub(self.channel)

    def run_loops(self) -> None:
        """Start queued runs from now on, and answer the exchange."""
        self._loops = [
            asyncio.create_task(self.coordinator.duties.run_forever()),
            asyncio.create_task(self.coordinator.server.serve()),
        ]

    async def stop(self) -> None:
        """Stop in the order of serving.py."""
        stopped = asyncio.create_task(self.server.stop(5.0))
        await asyncio.sleep(0)
        await self.coordinator.end_streams()
        await stopped
        for loop in self._loops:
            loop.cancel()
        if self._loops:
            await asyncio.wait(self._loops)
        await self.channel.close()
        await self.records_servicer.close()
        self.coordinator.close()
        self.ledger.close()

    def be_silent(self, member_id: str, time_outs: float = 2.0) -> float:
        """Move a member's last report back by so many time-outs; return the seconds."""
        member = self.coordinator.members.get(member_id)
        assert member is not None
        age_s = time_outs * self.coordinator.members.timeout_s
        member.last_report_s -= age_s
        return age_s

    async def submit(self, **sections: Any) -> run_pb2.Run:
        """Submit a run of the tests' spec."""
        spec = make_spec(self.directory, **{"logger": {"tensorboard": False}} | sections)
        response = await self.runs.Submit(run_pb2.SubmitRequest(spec_yaml=spec_to_yaml(spec)))
        return response.run

    async def run_one(self, **sections: Any) -> run_pb2.Run:
        """Submit a run, run the loops, and return the run when it trains."""
        run = await self.submit(**sections)
        self.run_loops()
        await self.watch_until(run.run_id, "state", state="running")
        return run

    async def watch_until(self, run_id: str, kind: str, **content: Any) -> list[tuple[int, str]]:
        """Return the events up to the first of that kind and content."""
        seen = []
        async with asyncio.timeout(DEADLINE_S):
            async for event in self.runs.Watch(run_pb2.WatchRequest(run_id=run_id)):
                seen.append((event.sequence, event.kind))
                if event.kind == kind and content.items() <= json.loads(event.json).items():
                    return seen
        raise AssertionError(f"the run ended without {kind} {content}: {seen}")


class Worker:
    """The stream of a worker."""

    def __init__(self, plane: Plane, role: Any, member_id: str, **hello: Any):
        self._reports: asyncio.Queue[worker_pb2.ConnectRequest | None] = asyncio.Queue()
        fields = {"role": role, "member_id": member_id, "protocol": PROTOCOL} | hello
        self._reports.put_nowait(worker_pb2.ConnectRequest(hello=worker_pb2.Hello(**fields)))
        self.call = plane.workers.Connect(self._outgoing())

    secret = b""
    """Secret of the Welcome, once it was read."""

    def say(self, **report: Any) -> None:
        """Send a report."""
        self._reports.put_nowait(worker_pb2.ConnectRequest(**report))

    def hang_up(self) -> None:
        """End the stream from this side."""
        self._reports.put_nowait(None)

    async def hear(self, kind: str) -> Any:
        """Return the next directive of a kind; others are skipped."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                directive = await self.call.read()
                assert directive is not grpc.aio.EOF, f"the stream ended before {kind!r}"
                if directive.WhichOneof("directive") == "welcome":
                    self.secret = directive.welcome.secret
                if directive.WhichOneof("directive") == kind:
                    return getattr(directive, kind)

    async def hear_epoch(self, *member_ids: str) -> None:
        """Read until a roster has exactly these members."""
        while list((await self.hear("epoch")).member_ids) != list(member_ids):
            pass

    async def hear_the_end(self) -> None:
        """Read until the stream ends."""
        async with asyncio.timeout(DEADLINE_S):
            while await self.call.read() is not grpc.aio.EOF:
                pass

    async def _outgoing(self) -> AsyncIterator[worker_pb2.ConnectRequest]:
        while (report := await self._reports.get()) is not None:
            yield report


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """Return status and text of a call that has to fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


def offer(run_id: str, session: int, step: int, member_id: str = "rollout-1") -> worker_pb2.WeightOffer:
    """Return the learner's offer of a version."""
    message = worker_pb2.WeightOffer(run_id=run_id, member_id=member_id)
    message.version.session, message.version.step = session, step
    return message


def ack(run_id: str, session: int, step: int, member_id: str = "rollout-1") -> worker_pb2.WeightAck:
    """Return a member's acknowledgement that it samples from a version."""
    message = worker_pb2.WeightAck(run_id=run_id, member_id=member_id, ok=True)
    message.version.session, message.version.step = session, step
    return message


def rollout(plane: Plane, member_id: str = "rollout-1", **hello: Any) -> Worker:
    return Worker(plane, common_pb2.ROLE_ROLLOUT, member_id, **hello)


def learner(plane: Plane, member_id: str = "learner-1", **hello: Any) -> Worker:
    ranks = {"world_size": int(hello.get("rank", 0)) + 1}
    return Worker(plane, common_pb2.ROLE_LEARNER, member_id, **ranks | hello)

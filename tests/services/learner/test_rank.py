"""A learner rank: its health after the set-up of its last run, and directives about weights."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock, call

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.services.learner.rank import LearnerRank, serve_learner
from paceline.services.learner.training.run import LearnerRun
from paceline.v1 import worker_pb2

DEADLINE_S = 60.0
SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)


class Served:
    """A rank that listens; its coordinator is away. `options` are further ones of the rank."""

    def __init__(self, **options: Any) -> None:
        cpu = torch.device("cpu")
        self.rank = LearnerRank("127.0.0.1:1", "learner", cpu, "127.0.0.1", "127.0.0.1", 5.0, **options)
        self.rank.listeners.server = self.rank.background.wait(serve_learner(self.rank, "127.0.0.1", 0), DEADLINE_S)
        self.rank.join()
        self.channel = grpc.insecure_channel(self.rank.introduction.address)

    def health(self, service: str = "paceline.v1.LearnerService") -> Any:
        request = health_pb2.HealthCheckRequest(service=service)
        return health_pb2_grpc.HealthStub(self.channel).Check(request, timeout=DEADLINE_S).status

    def wait_for(self, status: Any) -> None:
        """Wait until health, which is set beside the main thread, has this status."""
        request = health_pb2.HealthCheckRequest(service="paceline.v1.LearnerService")
        watched = health_pb2_grpc.HealthStub(self.channel).Watch(request, timeout=DEADLINE_S)
        next(response for response in watched if response.status == status)
        watched.cancel()

    def order(self, **directive: Any) -> None:
        """Let the rank process a directive of the coordinator."""
        self.rank.background.wait(self.rank.on_directive(worker_pb2.ConnectResponse(**directive)), DEADLINE_S)

    def close(self) -> None:
        self.channel.close()
        assert self.rank.listeners.server is not None
        self.rank.background.wait(self.rank.listeners.server.stop(0.0), DEADLINE_S)
        self.rank.background.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(contextlib.closing(Served(**options)))


class Run:
    """A run whose set-up fails in session 2, and succeeds in session 3."""

    diverged = False

    def __init__(self, served: Served, session: int) -> None:
        self._served, self.session, self.ready = served, session, session == 3

    def train(self) -> None:
        self._served.wait_for(SERVING)  # it may succeed: what was before is over
        self._served.rank.stopping.set()

    def close(self) -> None:
        pass


def test_health_says_whether_the_learner_could_set_up_its_last_run(serve: Callable[..., Served]) -> None:
    def make_run(assignment: worker_pb2.RunAssignment, rank: LearnerRank) -> Any:
        if assignment.session > 1:
            return Run(served, assignment.session)
        rank.stopping.set()
        return LearnerRun(assignment, rank)

    served = serve(make_run=make_run)
    served.wait_for(SERVING)
    for session, status in ((1, NOT_SERVING), (2, NOT_SERVING), (3, SERVING)):
        served.rank.stopping.clear()
        served.order(run=worker_pb2.RunAssignment(run_id="run-1", session=session, spec_yaml="telepathy: 1"))
        served.rank.serve_forever()
        served.wait_for(status)
        assert served.health("") == SERVING, "the process lives"


def test_messages_about_weights_go_to_the_publishing_of_the_run(serve: Callable[..., Served]) -> None:
    served, publishing = serve(), MagicMock()
    ack = worker_pb2.WeightAck(run_id="run-1", member_id="m", ok=True)
    roster = worker_pb2.Epoch(run_id="run-1", number=2, member_ids=["m"])
    progress = worker_pb2.WeightProgress(run_id="run-1", member_id="m")
    for run in (None, SimpleNamespace(publishing=publishing)):  # without a run nothing fails
        served.rank.current_run = cast(Any, run)
        served.order(epoch=roster)
        served.order(weight_ack=ack)
        served.order(weight_acks=worker_pb2.WeightAcks(acks=[ack, ack]))
        served.order(weight_progress=progress)
    served.rank.current_run = None
    assert publishing.mock_calls == [
        call.set_members(roster),
        *[call.acknowledge(ack)] * 3,
        call.progress(progress),
    ]
    assert served.rank.assigned.early_roster == roster


def test_a_rank_ends_when_another_of_its_learner_is_lost(serve: Callable[..., Served]) -> None:
    ended: queue.Queue[int] = queue.Queue()
    served, leave = serve(end=ended.put), AsyncMock()
    served.rank.membership = cast(Any, SimpleNamespace(leave=leave))
    served.order(rank_lost=worker_pb2.RankLost(reason="learner b is silent for 16 s"))
    assert ended.get(timeout=DEADLINE_S) == 1
    leave.assert_awaited_once_with(reason="learner b is silent for 16 s")

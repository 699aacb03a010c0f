"""A learner rank: its health after the set-up of its last run, and directives about weights."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock, call

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.services.learner import rank as learner_rank
from paceline.services.learner.rank import LearnerRank, _serve
from paceline.v1 import worker_pb2

DEADLINE_S = 60.0
SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)


class Served:
    """A rank that listens; its coordinator is away."""

    def __init__(self) -> None:
        self.rank = LearnerRank("127.0.0.1:1", "learner", torch.device("cpu"), "127.0.0.1", "127.0.0.1", 5.0)
        self.rank.server = self.rank.background.wait(_serve(self.rank, "127.0.0.1", 0), DEADLINE_S)
        self.rank.join()
        self.channel = grpc.insecure_channel(self.rank.address)

    def health(self, service: str = "paceline.v1.LearnerService") -> Any:
        request = health_pb2.HealthCheckRequest(service=service)
        return health_pb2_grpc.HealthStub(self.channel).Check(request, timeout=DEADLINE_S).status

    def wait_for(self, status: Any) -> None:
        """Until health says so; it is set beside the main thread."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self.health() != status:
            assert time.monotonic() < deadline_s, "health did not change"
            time.sleep(0.01)


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.channel.close()
    assert served.rank.server is not None
    served.rank.background.wait(served.rank.server.stop(0.0), DEADLINE_S)
    served.rank.background.close()


def test_health_says_whether_the_learner_could_set_up_its_last_run(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = served.rank
    served.wait_for(SERVING)
    rank._work_on(worker_pb2.RunAssignment(run_id="run-1", session=1, spec_yaml="telepathy: 1"))
    served.wait_for(NOT_SERVING)
    assert served.health("") == SERVING, "the process lives"

    class Run:
        """A run whose set-up fails in the first session, and not in the second."""

        diverged = False

        def __init__(self, assignment: worker_pb2.RunAssignment, _: LearnerRank) -> None:
            self.session, self.ready = assignment.session, assignment.session == 2

        def train(self) -> None:
            served.wait_for(SERVING)  # it may succeed: what was before is over
            rank.stopping.set()

        def close(self) -> None:
            pass

    monkeypatch.setattr(learner_rank, "LearnerRun", Run)
    for session, status in ((1, NOT_SERVING), (2, SERVING)):
        rank.stopping.clear()
        rank._assignments.put(worker_pb2.RunAssignment(run_id="run-2", session=session).SerializeToString())
        rank.serve_forever()
        served.wait_for(status)


def test_messages_about_weights_go_to_the_publishing_of_the_run(served: Served) -> None:
    rank, publishing = served.rank, MagicMock()
    ack = worker_pb2.WeightAck(run_id="run-1", member_id="m", ok=True)
    roster = worker_pb2.Epoch(run_id="run-1", number=2, member_ids=["m"])
    progress = worker_pb2.WeightProgress(run_id="run-1", member_id="m")
    directives = [
        worker_pb2.ConnectResponse(epoch=roster),
        worker_pb2.ConnectResponse(weight_ack=ack),
        worker_pb2.ConnectResponse(weight_acks=worker_pb2.WeightAcks(acks=[ack, ack])),
        worker_pb2.ConnectResponse(weight_progress=progress),
    ]
    for run in (None, SimpleNamespace(publishing=publishing)):  # without a run nothing fails
        rank.current_run = cast(Any, run)
        for directive in directives:
            rank.background.wait(rank._on_directive(directive), DEADLINE_S)
    rank.current_run = None
    assert publishing.mock_calls == [
        call.set_members(roster),
        *[call.acknowledge(ack)] * 3,
        call.progress(progress),
    ]
    assert rank.early_roster == roster


def test_a_rank_ends_when_another_of_its_learner_is_lost(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(learner_rank, "end_process", ended.put)
    leave = AsyncMock()
    monkeypatch.setattr(served.rank.membership, "leave", leave)
    lost = worker_pb2.RankLost(reason="learner b is silent for 16 s")
    directive = worker_pb2.ConnectResponse(rank_lost=lost)
    served.rank.background.wait(served.rank._on_directive(directive), DEADLINE_S)
    assert ended.get(timeout=DEADLINE_S) == 1
    leave.assert_awaited_once_with(reason="learner b is silent for 16 s")

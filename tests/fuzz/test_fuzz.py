"""A short storm of strange messages: no service dies, the run ends well; and the messages are what they are meant to be."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz import ROLES, fuzz
from messages import Maker
from targets import exchange_message, methods_of

from protos.paceline.v1 import exchange_pb2 as pb
from protos.paceline.v1 import worker_pb2


@pytest.mark.slow
def test_a_run_beside_strange_messages_ends_well(tmp_path: Path) -> None:
    found = fuzz(tmp_path, messages=4000, seconds=60.0, seed=3, steps=30)
    assert found.problems == []
    assert found.crashes == 0
    assert found.run_ended_well
    assert found.messages > 1000


def test_every_rpc_is_called() -> None:
    names = {method.full_name.removeprefix("paceline.v1.") for role in ROLES for method in methods_of(role)}
    assert {
        "RunService.Submit",
        "WorkerService.Connect",
        "RolloutService.Generate",
        "RewardService.Score",
        "LearnerService.Export",
    } <= names


def test_every_body_and_report_is_made_again_from_its_seed() -> None:
    def made(seed: int) -> list[bytes]:
        maker = Maker(seed, {"term": [7]})
        return [frame for _ in range(300) for frame in exchange_message(maker)]

    assert made(1) == made(1) != made(2)
    maker = Maker(1, {"term": [7]})
    requests = [maker.message(pb.ExchangeRequest.DESCRIPTOR) for _ in range(300)]
    bodies = {field.name for field in pb.ExchangeRequest.DESCRIPTOR.oneofs[0].fields}
    assert {request.WhichOneof("body") for request in requests} >= bodies
    assert sum(request.term == 7 for request in requests) > 100
    reports = [maker.message(worker_pb2.ConnectRequest.DESCRIPTOR) for _ in range(300)]
    kinds = {field.name for field in worker_pb2.ConnectRequest.DESCRIPTOR.oneofs[0].fields}
    assert {report.WhichOneof("report") for report in reports} >= kinds
    roles = {report.hello.role for report in reports if report.HasField("hello")}
    assert roles - {0, 1, 2, 3}, "roles that nobody knows yet"

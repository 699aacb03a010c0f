"""A short storm of strange messages: no service dies, the run ends well; and the messages are what they are meant to be."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest
from fuzz import Amount, fuzz
from messages import Maker
from raw_frames import RawFrames
from targets import SERVICES, exchange_message, methods_of

from paceline import v1
from paceline.v1 import exchange_pb2 as pb
from paceline.v1 import worker_pb2


@pytest.mark.slow
def test_a_run_beside_strange_messages_and_floods_ends_well(tmp_path: Path) -> None:
    found = fuzz(tmp_path, Amount(1000, 50, seconds=10.0), seed=3, steps=8, rollouts=1)
    assert found.problems == []
    assert found.crashes == 0
    assert found.run_ended_well
    assert found.sent.keys() == {"exchange", "grpc", "endpoint", "page", "metrics", "agent"}
    assert all(found.sent.values())
    assert found.half_open > 500
    assert found.submissions["queued"]
    assert found.submissions["RESOURCE_EXHAUSTED"]


def test_every_rpc_of_every_service_is_called() -> None:
    modules = [
        import_module(f"{v1.__name__}.{module.name}")
        for module in iter_modules(v1.__path__)
        if module.name.endswith("_pb2")
    ]
    services = [each for module in modules for each in module.DESCRIPTOR.services_by_name.values()]
    there = {method.full_name for service in services for method in service.methods}
    called = {method.full_name for role in SERVICES for method in methods_of(role)}
    assert len(there) > 40
    assert there < called
    assert {name for name in called - there if not name.startswith("grpc.")} == set()


def test_frames_that_no_library_sends_are_made_again_from_their_seed() -> None:
    def made(seed: int) -> list[bytes]:
        source = RawFrames("tcp://127.0.0.1:1", seed)
        return [source.frame() for _ in range(200)]

    assert made(1) == made(1) != made(2)
    assert len({frame[0] for frame in made(1)}) == 10, "every kind of flags"


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

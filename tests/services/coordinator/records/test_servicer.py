"""RecordsService over real gRPC: answers beside a coordinator that works, a comparison in a process, bounds on readers."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path

import grpc
import pytest
from control_plane import Plane, Worker, refusal

from paceline.client import Client
from paceline.errors import NotFound
from paceline.services.coordinator.records import servicer as records_servicer
from paceline.services.coordinator.records.files import read_log
from paceline.services.coordinator.records.reader import RecordsReader
from paceline.v1 import common_pb2, run_pb2, worker_pb2
from paceline.v1 import records_pb2 as pb


async def test_a_run_is_read_by_its_client(plane: Plane) -> None:
    run = await plane.submit()

    def read() -> None:
        with Client(f"127.0.0.1:{plane.server.port}") as client:
            records = client.records
            assert client.metrics(run.run_id) == {"step": []}
            assert [event.content["state"] for event in records.events(run.run_id, kinds=["state"])] == ["queued"]
            assert records.books(run.run_id).balanced
            assert client.samples(run.run_id) == {}
            assert records.gauges() == []
            with pytest.raises(NotFound, match="has trained no batch yet"):
                records.newest_trained_step(run.run_id)
            verified = records.verify(run.run_id)
            assert verified.problems == []
            assert verified.facts["state"] == "queued"

    await asyncio.to_thread(read)
    code, details = await refusal(plane.records.GetBooks(pb.GetBooksRequest(run_id="nosuch")))
    assert code is grpc.StatusCode.NOT_FOUND
    assert run.run_id in details
    code, _ = await refusal(plane.records.VerifyRun(pb.VerifyRunRequest(run_id="nosuch")))
    assert code is grpc.StatusCode.NOT_FOUND


async def test_members_have_their_gauges(plane: Plane) -> None:
    worker = Worker(plane, common_pb2.ROLE_REWARD, "reward-0")
    await worker.hear("welcome")
    gauges = {"memory_gb": 0.5}
    worker.say(heartbeat=worker_pb2.Heartbeat(gauges=gauges))
    while not (members := (await plane.records.ListGauges(pb.ListGaugesRequest())).members)[0].gauges:
        pass
    (member,) = members
    assert (member.member_id, member.role) == ("reward-0", common_pb2.ROLE_REWARD)
    assert dict(member.gauges) == gauges
    assert member.connected
    worker.hang_up()


async def test_a_bounded_number_of_readers_waits(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    run, release, begun = await plane.submit(), threading.Event(), threading.Event()
    monkeypatch.setattr(records_servicer, "MAX_WAITING", 2)

    def slow(reader: RecordsReader, request: pb.GetBooksRequest) -> pb.GetBooksResponse:
        begun.set()
        assert release.wait(60)
        return pb.GetBooksResponse()

    monkeypatch.setattr(RecordsReader, "GetBooks", slow)
    request = pb.GetBooksRequest(run_id=run.run_id)
    calls = [asyncio.ensure_future(plane.records.GetBooks(request)) for _ in range(2)]
    assert await asyncio.to_thread(begun.wait, 20)
    await plane.runs.Get(run_pb2.GetRequest(run_id=run.run_id))  # after both have come
    code, details = await refusal(plane.records.GetBooks(request))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "2 requests for records wait" in details
    response = await plane.runs.Get(run_pb2.GetRequest(run_id=run.run_id))  # the loop is free meanwhile
    assert response.run.run_id == run.run_id
    release.set()
    await asyncio.gather(*calls)


async def test_log_lines_of_services_are_read(plane: Plane, tmp_path: Path) -> None:
    (plane.directory / "logs").mkdir()
    (plane.directory / "logs" / "rollout-0.log").write_text("a line\n")
    answer = await plane.records.ReadLog(pb.ReadLogRequest(name="rollout-0"))
    assert (list(answer.names), answer.text, answer.size) == (["rollout-0"], "a line\n", 7)


def test_a_log_that_is_no_file_is_refused_and_nothing_stays_open(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    (logs / "folder.log").mkdir(parents=True)
    os.mkfifo(logs / "pipe.log")
    (logs / "link.log").symlink_to(__file__)
    before = len(os.listdir("/proc/self/fd"))
    for name, why in (("folder", "Is a directory"), ("pipe", "not a file"), ("link", "symbolic links")):
        with pytest.raises(NotFound, match=why):
            read_log(tmp_path, pb.ReadLogRequest(name=name))
    assert len(os.listdir("/proc/self/fd")) == before


async def test_specs_are_read(plane: Plane) -> None:
    first, second = await plane.submit(), await plane.submit(grpo={"max_num_steps": 9})
    request = pb.CompareSpecsRequest(run_id=first.run_id, other_run_id=second.run_id)
    differences = (await plane.records.CompareSpecs(request)).differences
    assert {each.path: json.loads(each.other_json) for each in differences}["grpo.max_num_steps"] == 9

"""Every acknowledgement follows its syncs, as the system calls of a real coordinator show under strace.

For each of many groups in flight at once: its bytes are written to a segment, then that is synced, then its row is
written to the log, then that is synced, and only then is the answer sent.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from exchange_drivers import group_result, make_completion, make_spec

from paceline.calls.token import open_channel
from paceline.groups import Version
from paceline.spec.reading import spec_to_yaml
from paceline.v1 import common_pb2, run_pb2, run_pb2_grpc, worker_pb2, worker_pb2_grpc
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import PROTOCOL

DEADLINE_S = 120.0
FIRST_REQUEST_ID = 1 << 40
"""Seven bytes that only the results contain."""

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace; .ci/run installs it")


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[tuple[str, Callable[[], Path]]]:
    """A coordinator under strace: its address, and a function that ends it and returns the trace's file."""
    trace, ready = tmp_path / "trace", tmp_path / "ready"
    command = [
        sys.executable,
        "-m",
        "paceline.services.coordinator.main",
        "--port",
        "0",
        "--ready-file",
        str(ready),
    ]
    calls = "trace=writev,pwrite64,fsync,fdatasync,sendto"
    process = subprocess.Popen(
        [
            "strace",
            "-f",
            "-y",
            "-xx",
            "-s",
            "20000",
            "-e",
            calls,
            "-o",
            str(trace),
            *command,
            "--directory",
            str(tmp_path / "runs"),
        ],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )

    def kill() -> Path:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children():
                child.kill()
        process.wait(DEADLINE_S)
        return trace

    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "listening on" in line:
                break
        yield ready.read_text().strip(), kill
    finally:
        kill()
        process.stderr.close()


@dataclass
class Result:
    """A submitted group."""

    digest: bytes
    marker: bytes
    request_id: int


def submit_all(address: str, directory: Path) -> list[Result]:
    """Lease all groups to one worker, send all results, then wait for all answers."""
    spec = make_spec(directory, grpo={"num_prompts_per_step": 16}, logger={"tensorboard": False})
    results = []
    with open_channel(address) as channel, zmq.Context() as context:
        run_pb2_grpc.RunServiceStub(channel).Submit(run_pb2.SubmitRequest(spec_yaml=spec_to_yaml(spec)))
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        reports, directives = join(stub, common_pb2.ROLE_ROLLOUT, "rollout")
        welcome = next(directives).welcome
        run_id = next(d.run.run_id for d in directives if d.WhichOneof("directive") == "run")
        offers, learner = join(stub, common_pb2.ROLE_LEARNER, "learner")
        session = next(d.run.session for d in learner if d.WhichOneof("directive") == "run")
        offer = worker_pb2.WeightOffer(run_id=run_id, member_id="rollout")
        offer.version.session = session
        offers.put(worker_pb2.ConnectRequest(weight_offer=offer))
        next(d for d in directives if d.WhichOneof("directive") == "weight_offer")
        ack = worker_pb2.WeightAck(run_id=run_id, member_id="rollout", ok=True)
        ack.version.session = session
        reports.put(worker_pb2.ConnectRequest(weight_ack=ack))
        with context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
            socket.connect(welcome.exchange_endpoint)

            def send(request: pb.ExchangeRequest, *frames: bytes) -> None:
                request.protocol, request.term, request.run_id = PROTOCOL, welcome.term, run_id
                request.member_id, request.secret = "rollout", welcome.secret
                socket.send_multipart([request.SerializeToString(), *frames])

            send(pb.ExchangeRequest(lease=pb.LeaseRequest(room=64, wait_s=20.0)))
            leases = pb.ExchangeReply.FromString(socket.recv_multipart()[0]).lease.leases
            for lease in leases:
                marker = f"<marker of group {lease.group_id:04d}>"
                pair = [make_completion(Version(1, 0), 5, lease.group_id * 2 + i, marker) for i in range(2)]
                request, frames = group_result(lease.group_id, lease.attempt, pair)
                request.request_id = FIRST_REQUEST_ID + lease.group_id
                results.append(Result(request.group.digest.encode(), marker.encode(), request.request_id))
                send(request, *frames)
            for _ in leases:
                reply = pb.ExchangeReply.FromString(socket.recv_multipart()[0])
                assert reply.status == pb.REPLY_STATUS_COMMITTED, reply.message
        directives.close()
        learner.close()
    return results


def join(
    stub: Any, role: common_pb2.Role.ValueType, member_id: str
) -> tuple[queue.SimpleQueue[worker_pb2.ConnectRequest], Any]:
    """Join as a member; return the queue of its reports, and its directives."""
    reports: queue.SimpleQueue[worker_pb2.ConnectRequest] = queue.SimpleQueue()
    hello = worker_pb2.Hello(role=role, member_id=member_id, protocol=PROTOCOL)
    reports.put(worker_pb2.ConnectRequest(hello=hello))
    return reports, stub.Connect(iter(reports.get, None))


@dataclass
class Event:
    """The beginning of a write or a send, or the end of a sync."""

    call: str
    path: str
    content: bytes = b""
    began: int = 0
    """Sync: number of events before it began. It need not cover later writes."""


def read_trace(trace: Path) -> list[Event]:
    """Return the calls in their order over all threads."""
    events, under_way = [], {}
    for line in trace.read_text().splitlines():
        thread, text = line.split(maxsplit=1)
        if resumed := re.match(r"<\.\.\. (\w+) resumed>", text):
            if "sync" in resumed[1] and text.endswith("= 0"):
                path, began = under_way.pop(thread)
                events.append(Event("synced", path, began=began))
        elif begun := re.match(r"(\w+)\(\d+<([^>]*)>", text):
            call, path = begun[1], unquote(begun[2]).decode()
            if "sync" not in call:
                content = b"".join(unquote(part) for part in re.findall(r'"([^"]*)"', text))
                events.append(Event("sent" if call == "sendto" else "written", path, content))
            elif text.endswith("<unfinished ...>"):
                under_way[thread] = path, len(events)
            elif text.endswith("= 0"):
                events.append(Event("synced", path, began=len(events)))
    return events


def unquote(text: str) -> bytes:
    """Return the bytes of hexadecimal digits by strace; a socket's name is unchanged."""
    return bytes.fromhex(text.replace(r"\x", "")) if text.startswith(r"\x") else text.encode()


def find(events: list[Event], start: int, call: str, ending: str, content: bytes = b"") -> int:
    """Return the index of the first such event from `start` on; a sync has to begin after `start`."""
    for index in range(start, len(events)):
        event = events[index]
        late_enough = call != "synced" or event.began > start
        if late_enough and event.call == call and event.path.endswith(ending) and content in event.content:
            return index
    raise AssertionError(f"no {call} {ending} with {content!r} after {start}")


def test_every_acknowledgement_follows_its_syncs(traced: tuple[str, Callable[[], Path]], tmp_path: Path) -> None:
    address, kill = traced
    results = submit_all(address, tmp_path)
    events = read_trace(kill())
    assert len(results) == 32
    for result in results:
        stored = find(events, 0, "written", ".seg", result.marker)
        row = find(events, 0, "written", "-wal", result.digest)
        answer = find(events, 0, "sent", "", pb.ExchangeReply(request_id=result.request_id).SerializeToString())
        assert stored < find(events, stored, "synced", ".seg") < row
        assert row < find(events, row, "synced", "-wal") < answer

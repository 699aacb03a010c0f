"""The coordinator as a process: one per ledger, clear errors when it cannot start, a quick and clean stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from exchange_drivers import make_spec

from paceline.calls.token import open_channel
from paceline.services.common.serving.grpc_server import GrpcServer
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.spec.reading import spec_to_yaml
from paceline.v1 import common_pb2, run_pb2, run_pb2_grpc, worker_pb2, worker_pb2_grpc
from paceline.wire import PROTOCOL

DEADLINE_S = 60.0
COMMAND = [sys.executable, "-m", "paceline.services.coordinator.main", "--port", "0"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
Start = Callable[..., tuple["subprocess.Popen[str]", str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a coordinator on a directory and returns it with its address once it listens."""
    processes: list[subprocess.Popen[str]] = []

    def start_one(directory: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
        pipe = tmp_path / f"ready-{len(processes)}"
        process = subprocess.Popen(
            [*COMMAND, "--directory", str(directory), "--ready-file", str(pipe), *options],
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        processes.append(process)
        assert process.stderr is not None
        overdue = threading.Timer(DEADLINE_S, process.kill)
        overdue.start()
        try:
            for line in process.stderr:  # ends when the process does
                if "listening on" in line:
                    return process, pipe.read_text().strip()
        finally:
            overdue.cancel()
        raise AssertionError(f"it ended with status {process.wait()} before it listened")

    yield start_one
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def refused(directory: Path, *options: str) -> str:
    """Return the error of a coordinator that cannot start."""
    command = [*COMMAND, "--directory", str(directory), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=ENVIRONMENT)
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr


def test_one_coordinator_per_ledger_and_its_lock_dies_with_it(start: Start, tmp_path: Path) -> None:
    first, _ = start(tmp_path / "runs")
    assert "another coordinator has the ledger" in refused(tmp_path / "runs")
    first.kill()  # the lock dies with its process, however that one dies
    first.wait(DEADLINE_S)
    Ledger(tmp_path / "runs" / "ledger.sqlite").close()


async def test_taken_ports_are_said(tmp_path: Path) -> None:
    server = GrpcServer("127.0.0.1", 0)  # as that of another coordinator
    await server.start()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1])
        grpc_error, exchange_error = await asyncio.gather(
            asyncio.to_thread(refused, tmp_path / "one", "--port", str(server.port)),
            asyncio.to_thread(refused, tmp_path / "two", "--exchange-port", number),
        )
    await server.stop(0.0)
    assert f"cannot listen on 127.0.0.1:{server.port}" in grpc_error
    assert f"the exchange cannot listen on 127.0.0.1:{number}" in exchange_error


def test_sigterm_does_not_wait_for_a_watcher(start: Start, tmp_path: Path) -> None:
    """With a grace longer than the deadline: the stream has to be ended, not waited for."""
    process, address = start(tmp_path / "runs", "--grace", "600")
    rows = tmp_path / "train.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    spec = f"algorithm: sft\npolicy: {{model_name: none}}\ndata: {{train: {rows}}}\n"
    with open_channel(address) as channel:
        runs = run_pb2_grpc.RunServiceStub(channel)
        run = runs.Submit(run_pb2.SubmitRequest(spec_yaml=spec), timeout=DEADLINE_S).run
        events = runs.Watch(run_pb2.WatchRequest(run_id=run.run_id), timeout=DEADLINE_S)
        assert next(events).kind == "state"
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
        with pytest.raises(grpc.RpcError):
            list(events)


def test_sigterm_does_not_wait_for_a_url_that_never_answers(start: Start, tmp_path: Path) -> None:
    process, address = start(tmp_path / "runs", "--grace", "0")
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        open_channel(address) as channel,
        ThreadPoolExecutor(1) as client,
    ):
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/train.jsonl"
        spec = f"algorithm: sft\npolicy: {{model_name: none}}\ndata: {{train: '{url}'}}\n"
        submit = client.submit(run_pb2_grpc.RunServiceStub(channel).Submit, run_pb2.SubmitRequest(spec_yaml=spec))
        silent.settimeout(DEADLINE_S)
        connection, _ = silent.accept()
        with connection:
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0
        with pytest.raises(grpc.RpcError):
            submit.result()


def test_a_disk_that_refuses_ends_it_with_the_reason(start: Start, tmp_path: Path) -> None:
    """A worker's stream gets the fault. It must not merely break, because workers would reconnect for ever."""
    process, address = start(tmp_path / "runs")
    channel = open_channel(address)
    spec = spec_to_yaml(make_spec(tmp_path, logger={"tensorboard": False}))
    runs = run_pb2_grpc.RunServiceStub(channel)
    run_id = runs.Submit(run_pb2.SubmitRequest(spec_yaml=spec)).run.run_id
    for event in runs.Watch(run_pb2.WatchRequest(run_id=run_id)):
        if "running" in event.json:
            break
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1, 1))  # from now on every write to a file fails
    hello = worker_pb2.Hello(role=common_pb2.ROLE_ROLLOUT, member_id="rollout-1", protocol=PROTOCOL)
    stream = worker_pb2_grpc.WorkerServiceStub(channel).Connect(iter([worker_pb2.ConnectRequest(hello=hello)]))
    with pytest.raises(grpc.RpcError):
        list(stream)
    _, said = process.communicate(timeout=DEADLINE_S)
    channel.close()
    assert process.returncode == 1
    assert re.search(
        r"Error: the (ledger .*ledger\.sqlite|audit log .*audit) cannot be written: .*; make room, or repair the disk",
        said,
    )
    assert "was never awaited" not in said

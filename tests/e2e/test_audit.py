"""The audit log of real services: what was permitted, what was refused, and tampering with it afterwards."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import zmq
from audit_records import found, knock, paceline, refused, shown
from joined_worker import JoinedWorker
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from paceline.calls.token import metadata
from paceline.client import Client
from paceline.errors import PacelineError
from paceline.services.common.access.rights import CallerRole
from paceline.services.common.access.token_table import create, revoke
from paceline.services.local.cluster import LocalCluster
from paceline.spec import RunSpec
from paceline.spec.reading import spec_to_yaml
from paceline.tls.channels import open_aio_channel
from paceline.tls.folder import VARIABLE, TlsFolder
from paceline.v1 import common_pb2, run_pb2, run_pb2_grpc, worker_pb2, worker_pb2_grpc
from paceline.wire import PROTOCOL

DEADLINE_S = 60.0
SECRET = "a-prompt-that-nobody-else-may-read"


def knock_with_a_strangers_key(worker: JoinedWorker) -> None:
    """Try to connect to the exchange with a key that is no member's, until ZeroMQ has refused it."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = z85.encode(worker.welcome.exchange_key)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        socket.connect(worker.welcome.exchange_endpoint)
        assert monitor.poll(DEADLINE_S * 1000)
        recv_monitor_message(monitor)
        socket.disable_monitor()
        monitor.close(linger=0)


async def until_gone(stub: Any, token: str, member_id: str) -> None:
    """Wait until a worker is no member any more."""
    while True:
        answer = await stub.ListMembers(worker_pb2.ListMembersRequest(), metadata=metadata(token))
        if member_id not in [member.member_id for member in answer.members]:
            return
        await asyncio.sleep(0.05)


async def test_what_changes_something_and_what_is_refused_is_on_record(
    guarded: LocalCluster,
    folders: dict[str, Path],
    make_spec: Callable[..., RunSpec],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """One of each: permitted, without token, with a wrong role, with a revoked token or certificate, in the name of another
    worker, with a stranger's key. Then the log is tampered with."""
    tokens = guarded.directory / "tokens.json"
    ann, eve = create(tokens, "ann", CallerRole.SUBMITTER, 0.0), create(tokens, "eve", CallerRole.VIEWER, 0.0)
    old = create(tokens, "old", CallerRole.OPERATOR, 0.0)
    revoke(tokens, "old")
    boot = guarded.token_file.read_text().strip()
    workers: list[JoinedWorker] = []
    submission = run_pb2.SubmitRequest(spec_yaml=f"# {SECRET}\n{spec_to_yaml(make_spec())}")
    taken = worker_pb2.Hello(
        role=common_pb2.ROLE_REWARD,
        member_id="reward-a",
        protocol=PROTOCOL,
        exchange_key=z85.decode(zmq.curve_keypair()[0]),
    )
    try:
        async with (
            asyncio.timeout(3 * DEADLINE_S),
            open_aio_channel(guarded.address, folder=TlsFolder(folders["pool-a"])) as channel,
        ):
            for name in ("a", "b"):
                monkeypatch.setenv(VARIABLE, str(folders[f"pool-{name}"]))
                workers.append(JoinedWorker(guarded.address, f"reward-{name}"))
                await workers[-1].is_here.wait()
            runs = run_pb2_grpc.RunServiceStub(channel)
            service: Any = worker_pb2_grpc.WorkerServiceStub(channel)
            run_id = (await runs.Submit(submission, metadata=metadata(ann))).run.run_id  # type: ignore[misc]
            cancel = run_pb2.CancelRequest(run_id=run_id)
            assert await refused(runs.Cancel(cancel)) is grpc.StatusCode.UNAUTHENTICATED
            assert await refused(runs.Cancel(cancel, metadata=metadata(old))) is grpc.StatusCode.UNAUTHENTICATED
            assert await refused(runs.Cancel(cancel, metadata=metadata(eve))) is grpc.StatusCode.PERMISSION_DENIED
            hello = iter([worker_pb2.ConnectRequest(hello=taken)])
            assert await refused(service.Connect(hello, metadata=metadata(boot))) is grpc.StatusCode.FAILED_PRECONDITION
            await workers[1].answer_to_forged(workers[0])
            await asyncio.to_thread(knock_with_a_strangers_key, workers[0])
            paceline("certs", "revoke", "pool-b", "--directory", str(guarded.directory))
            await until_gone(service, boot, "reward-b")
            async with open_aio_channel(guarded.address, folder=TlsFolder(folders["pool-b"])) as late:
                listing = run_pb2_grpc.RunServiceStub(late).List(run_pb2.ListRequest(), metadata=metadata(boot))
                assert await refused(listing) is grpc.StatusCode.UNAUTHENTICATED
            assert workers[0].membership.has_stream
            await runs.Cancel(cancel, metadata=metadata(ann))  # type: ignore[misc]
    finally:
        for worker in workers:
            await worker.end()
        await asyncio.to_thread(guarded.stop)
    assert "all records agree" in paceline("audit", "verify", "--directory", str(guarded.directory))
    records = shown(guarded.directory)
    rpc = "paceline.v1.RunService"
    assert [record["what"] for record in (records[0], records[-1])] == ["audit/start", "audit/stop"]
    for wanted in (
        {"what": f"{rpc}/Submit", "result": "OK", "who": "ann", "subject": run_id, "certificate": "pool-a"},
        {"what": f"{rpc}/Cancel", "result": "OK", "who": "ann", "subject": run_id},
        {"what": f"{rpc}/Cancel", "result": "UNAUTHENTICATED", "why": "no token", "address": "127.0.0.1:"},
        {"what": f"{rpc}/Cancel", "result": "UNAUTHENTICATED", "why": "the token old was revoked"},
        {"what": f"{rpc}/Cancel", "result": "PERMISSION_DENIED", "who": "eve"},
        {"what": "WorkerService/Connect", "result": "OK", "subject": "reward-b", "certificate": "pool-b"},
        {
            "what": "WorkerService/Connect",
            "result": "FAILED_PRECONDITION",
            "subject": "reward-a",
            "why": "secret",
        },
        {
            "what": "exchange/task",
            "result": "PERMISSION_DENIED",
            "subject": "reward-a",
            "why": "does not match the key",
        },
        {"what": "exchange/connection", "result": "PERMISSION_DENIED", "why": "key is no member's"},
        {
            "what": "WorkerService/Connect",
            "result": "UNAUTHENTICATED",
            "why": "certificates of pool-b were revoked",
        },
        {"what": "tokens/revoked", "subject": "old"},
        {"what": "certificates/revoked", "subject": "pool-b"},
        {"what": f"{rpc}/List", "result": "UNAUTHENTICATED", "certificate": "pool-b"},
    ):
        assert found(records, **wanted), wanted
    assert not found(records, what="ListMembers", result="OK")
    text = "".join(path.read_text() for path in (guarded.directory / "audit").iterdir())
    for secret in (SECRET, ann, eve, old, boot):
        assert secret not in text
    number = found(records, result="PERMISSION_DENIED", who="eve")[0]["sequence"]
    tampered = tmp_path / "tampered"
    shutil.copytree(guarded.directory, tampered)
    (path,) = (tampered / "audit").glob("*.jsonl")
    path.write_text(path.read_text().replace('"who":"eve"', '"who":"ann"', 1))
    told = paceline("audit", "verify", "--directory", str(tampered), status=1)
    assert f"record {number}: line {number} of 000001.jsonl was changed" in told
    told = paceline("ledger", "verify", run_id, "--directory", str(guarded.directory))
    assert f"audit_log: {len(records)} records" in told


async def test_handshakes_that_come_to_nothing_are_in_the_log_and_disturb_nobody(
    guarded: LocalCluster, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers without TLS at the port for gRPC and without CURVE at the exchange."""
    monkeypatch.setenv(VARIABLE, str(folders["pool-a"]))
    worker = JoinedWorker(guarded.address, "reward-a")
    try:
        async with asyncio.timeout(3 * DEADLINE_S):
            await worker.is_here.wait()
            await knock(guarded.address, b"GET / HTTP/1.1\r\n\r\n")
            exchange = worker.welcome.exchange_endpoint.removeprefix("tcp://")
            await knock(exchange, b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
            log = guarded.log_path("coordinator")
            while True:
                if all(text in log.read_text() for text in ("HTTP_REQUEST", "its handshake failed")):
                    break
                await asyncio.sleep(0.05)
        assert worker.membership.has_stream
    finally:
        await worker.end()
        await asyncio.to_thread(guarded.stop)
    assert [record for record in shown(guarded.directory) if record["result"] != "OK"] == []
    assert "all records agree" in paceline("audit", "verify", "--directory", str(guarded.directory))


@pytest.mark.merge
@pytest.mark.slow
def test_a_checkpoints_manifest_names_the_newest_record(
    cluster: LocalCluster, client: Client, make_spec: Callable[..., RunSpec]
) -> None:
    run_id = client.submit(make_spec(grpo={"max_num_steps": 4})).run_id
    for _ in client.watch(run_id):
        pass
    manifests = sorted((cluster.directory / run_id).glob("checkpoints/*/manifest.json"))
    named = [json.loads(path.read_text())["extra"]["audit"] for path in manifests]
    assert named
    with pytest.raises(PacelineError):
        client.cancel("none")
    records = {record["sequence"]: record["hash"] for record in shown(cluster.directory)}
    assert all(records[head["sequence"]] == head["hash"] for head in named)
    facts = json.loads(paceline("audit", "verify", "--json", "--directory", str(cluster.directory)))
    assert facts["problems"] == []
    assert facts["facts"]["manifests"] >= len(named)

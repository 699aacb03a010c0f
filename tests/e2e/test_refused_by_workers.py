"""Strangers that the ports of real workers and hosts' agents refuse are in the worker's log."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession
from audit_records import knock, refused
from free_ports import free_port
from joined_worker import JoinedWorker
from service_processes import Services, wait_for

from paceline.calls.token import metadata
from paceline.errors import Unavailable
from paceline.services.common.access.rights import CallerRole
from paceline.services.common.access.token_table import create
from paceline.services.common.relay import RelayConnection
from paceline.services.local.cluster import LocalCluster
from paceline.tls.certificates import WORKER_HOST
from paceline.tls.channels import TO_WORKER, open_aio_channel
from paceline.tls.folder import VARIABLE, TlsFolder
from paceline.tls.peers import PeerTls
from paceline.v1 import host_agent_pb2, reward_pb2, reward_pb2_grpc
from paceline.weights.hosts import frames
from paceline.weights.hosts.local_socket import LABEL_VARIABLE
from paceline.weights.hosts.transport import TlsTransport, Transport

DEADLINE_S = 60.0


async def ask_for_functions(address: str, token: str) -> grpc.StatusCode:
    """Ask a reward worker for its functions; return the status of the refusal."""
    async with open_aio_channel(address, TO_WORKER) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        listing: Any = stub.ListFunctions(
            reward_pb2.ListFunctionsRequest(),
            metadata=metadata(token),  # type: ignore[call-arg]  # its types are those of blocking calls
            wait_for_ready=True,
        )
        return await refused(listing)


def read_weights(agent: str, folder: TlsFolder | None) -> None:
    """Ask a host's agent for weights, without the run's secret; without TLS for no `folder`."""
    transport = Transport() if folder is None else TlsTransport(PeerTls(folder))
    with contextlib.closing(transport.connect(agent, DEADLINE_S)) as channel:
        if folder is None:
            channel.send(b"no handshake of TLS\n" * 10)
        with contextlib.suppress(Unavailable):
            nonce = frames.receive(channel, frames.NONCE_BYTES)
            request = host_agent_pb2.ReadRequest(protocol=frames.PROTOCOL, run_id="x", proof=nonce)
            frames.send_request(channel, request)
            assert frames.receive_head(channel)[0] is frames.Kind.REFUSED


@pytest.mark.merge
@pytest.mark.slow
async def test_what_a_worker_refuses_is_in_its_log_and_its_hosts_agent_refuses_strangers(
    guarded: LocalCluster, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A reward worker's gRPC server and metrics port, and the agent of a host with another worker."""
    eve = create(guarded.directory / "tokens.json", "eve", CallerRole.SCRAPER, 0.0)
    monkeypatch.setenv(VARIABLE, str(folders["pool-a"]))
    monkeypatch.setenv(LABEL_VARIABLE, str(tmp_path))  # an agent of this test alone
    services, port, metrics = Services(tmp_path / "services"), free_port(), free_port()
    member = JoinedWorker(guarded.address, "rollout-a")
    agent = RelayConnection(guarded.address, "127.0.0.1", "127.0.0.1")
    services.start(
        "reward",
        *("--coordinator", guarded.address, "--host", "0.0.0.0", "--advertise-host", "127.0.0.1"),
        *("--port", str(port), "--metrics-port", str(metrics), "--name", "reward-a"),
        *("--ready-file", str(tmp_path / "ready")),
    )
    try:
        async with asyncio.timeout(4 * DEADLINE_S):
            await member.is_here.wait()
            await asyncio.to_thread(wait_for, tmp_path / "ready", services.processes["reward"])
            rpc = "refused a call of paceline.v1.RewardService/ListFunctions from 127.0.0.1:"
            for token, code, why in (
                ("", grpc.StatusCode.UNAUTHENTICATED, "no token"),
                (eve, grpc.StatusCode.PERMISSION_DENIED, "eve has scraper"),
            ):
                # There is a line a second.
                while not any(rpc in line and why in line for line in services.log("reward").splitlines()):
                    assert await ask_for_functions(f"127.0.0.1:{port}", token) is code
            context = ssl.create_default_context(cafile=str(folders["person"] / "ca.crt"))
            async with ClientSession() as http:
                page = f"https://127.0.0.1:{metrics}/metrics"
                async with http.get(page, ssl=context, server_hostname=WORKER_HOST) as answer:
                    assert answer.status == 401
            assert "refused an HTTP request from 127.0.0.1" in services.log("reward")
            await knock(f"127.0.0.1:{port}", b"GET / HTTP/1.1\r\n\r\n")
            assert await agent.connected() is not None
            assert agent.identity is not None
            for folder in (None, TlsFolder(folders["pool-b"])):
                await asyncio.to_thread(read_weights, agent.identity.address, folder)
    finally:
        agent.close()
        await member.end()
        services.processes["reward"].kill()
        services.processes["reward"].wait()
    assert eve not in services.log("reward")

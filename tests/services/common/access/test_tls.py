"""gRPC under TLS: accepted callers, the others' errors, and certificates that are replaced while a server runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from aiohttp import ClientSession, web
from click.testing import CliRunner
from tls_folders import make_folders, old_certificate

from paceline.calls.token import open_channel
from paceline.client import Client
from paceline.errors import InvalidInput, PacelineError
from paceline.services.common.access.tls import identity_of_call
from paceline.services.common.serving.grpc_server import GrpcServer
from paceline.services.common.serving.healthcheck import main as healthcheck
from paceline.services.common.serving.json_http import JsonListener
from paceline.services.coordinator.members.introduction import check_certificate
from paceline.tls.authority import issue, make_authority, renew
from paceline.tls.certificates import Identity
from paceline.tls.channels import TO_WORKER, RenewedChannel, open_aio_channel, open_plain_or_tls, why_no_channel
from paceline.tls.folder import VARIABLE, TlsFolder

DEADLINE_S = 60.0
SERVER = """
import asyncio, sys
from paceline.services.common.serving.grpc_server import GrpcServer

async def main():
    server = GrpcServer("127.0.0.1", 0, mutual=True)
    async with server:
        print(server.port, flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


async def name_caller(_: bytes, context: Any) -> bytes:
    identity = identity_of_call(context)
    return f"{identity.name} {identity.role}".encode() if identity else b"nobody"


def register(_: Any, server: grpc.aio.Server) -> None:
    handlers = {"Who": grpc.unary_unary_rpc_method_handler(name_caller)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Certificates of one authority."""
    return make_folders(tmp_path, coordinator="coordinator", worker="worker")


@pytest.fixture
async def server(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GrpcServer]:
    """A server with a mutual port and one for people."""
    monkeypatch.setenv(VARIABLE, str(folders["coordinator"]))
    made = GrpcServer("127.0.0.1", 0, mutual=True, people_port=0)
    made.add(None, register, "test.Service")
    async with made:
        yield made


async def who(port: int | None, folder: Path) -> bytes:
    async with open_aio_channel(f"127.0.0.1:{port}", folder=TlsFolder(folder)) as channel:
        return bytes(await channel.unary_unary("/test.Service/Who")(b"", timeout=DEADLINE_S))


async def refusal(port: int | None, folder: Path) -> str:
    """Return the error of a caller that gets no connection."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await who(port, folder)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return await asyncio.to_thread(why_no_channel, f"127.0.0.1:{port}", TlsFolder(folder))


async def test_a_client_certificate_gives_its_identity_on_the_mutual_port(
    server: GrpcServer, folders: dict[str, Path]
) -> None:
    assert await who(server.port, folders["worker"]) == b"worker worker"
    assert await who(server.people_port, folders["person"]) == b"nobody"
    assert await asyncio.to_thread(why_no_channel, f"127.0.0.1:{server.port}", TlsFolder(folders["worker"])) == ""


async def test_others_are_refused_with_the_cause(
    server: GrpcServer, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "name the coordinator's --people-port" in await refusal(server.port, folders["person"])
    make_authority(tmp_path / "other")
    stranger = issue(tmp_path / "other", "stranger", "worker")
    assert "use one of the authority in" in await refusal(server.port, stranger)
    (stranger / "ca.crt").write_bytes((folders["worker"] / "ca.crt").read_bytes())
    assert "refuses the certificate" in await refusal(server.port, stranger)
    expired = issue(tmp_path / "ca", "expired", "worker", days=-0.001)
    assert "expired on" in await refusal(server.port, expired)
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(grpc.aio.AioRpcError):
        async with open_aio_channel(f"127.0.0.1:{server.port}") as channel:
            await channel.unary_unary("/test.Service/Who")(b"", timeout=DEADLINE_S)
    said = await asyncio.to_thread(why_no_channel, f"127.0.0.1:{server.people_port}")
    assert "uses TLS; give the folder" in said


async def test_a_server_without_tls_or_with_a_bad_certificate_is_named(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = GrpcServer("127.0.0.1", 0)
    plain.add(None, register, "test.Service")
    async with plain:
        assert "does not use TLS" in await refusal(plain.port, folders["worker"])
    expired = issue(tmp_path / "ca", "expired", "coordinator", days=-0.001)
    monkeypatch.setenv(VARIABLE, str(expired))
    async with GrpcServer("127.0.0.1", 0) as made:
        assert "expired; renew it" in await refusal(made.port, folders["worker"])


class Impostor:
    """A gRPC server with somebody's certificate, which takes note of every call."""

    def __init__(self, folder: Path) -> None:
        self.heard: list[Any] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        handler = grpc.stream_stream_rpc_method_handler(lambda requests, context: iter(()))
        service = SimpleNamespace(service=lambda call: self.heard.append(call) or handler)
        self._server.add_generic_rpc_handlers((cast(Any, service),))
        pair = ((folder / "tls.key").read_bytes(), (folder / "tls.crt").read_bytes())
        self.address = f"127.0.0.1:{self._server.add_secure_port('127.0.0.1:0', grpc.ssl_server_credentials([pair]))}"

    def __enter__(self) -> Impostor:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()


def holder(folders: dict[str, Path], role: str) -> Path:
    return old_certificate(folders["worker"].parent, f"an-old-{role}", role)


@pytest.mark.parametrize("role", ["viewer", "submitter", "operator", "worker", "scraper", "coordinator"])
async def test_no_call_reaches_a_server_without_a_coordinators_certificate(
    role: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate is valid for this address, and of the authority."""
    monkeypatch.setenv(VARIABLE, str(folders["worker"]))
    token = tmp_path / "token"
    token.write_text("a secret\n")
    with Impostor(holder(folders, role)) as impostor:
        with open_channel(impostor.address, token) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary("/paceline.v1.RunService/List")(b"", timeout=5.0)
        async with open_aio_channel(impostor.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.stream_stream("/paceline.v1.WorkerService/Connect")(iter([b""]), timeout=5.0).read()
        with pytest.raises(PacelineError) as caught:
            Client(impostor.address, token_file=token, wait_s=0.0).runs()
        assert impostor.heard == []
    expected = "renew it where its authority is" if role == "coordinator" else f"has the role {role}; issue"
    assert expected in str(caught.value)


@pytest.mark.parametrize("role", ["viewer", "coordinator"])
def test_a_worker_is_called_only_with_a_workers_certificate(
    role: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(folders["person"]))
    with Impostor(holder(folders, role)) as impostor:
        with (
            Client("127.0.0.1:1", token_file=tmp_path / "token") as client,
            client._channel_to(impostor.address, TO_WORKER) as channel,
            pytest.raises(grpc.RpcError),
        ):
            channel.unary_unary("/paceline.v1.RolloutService/Generate")(b"", timeout=5.0)
        assert impostor.heard == []


@pytest.mark.parametrize(
    ("role", "remedy"),
    [("worker", "for `paceline up`, whose processes share one, with --role up"), ("coordinator", "certs renew")],
)
async def test_a_coordinator_does_not_start_with_a_certificate_that_clients_refuse(
    role: str, remedy: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(holder(folders, role)))
    with pytest.raises(InvalidInput, match=remedy):
        GrpcServer("127.0.0.1", 0, mutual=True)


@pytest.mark.parametrize("role", ["coordinator", "worker", "up"])
async def test_a_health_check_asks_a_server_of_its_own_role(
    role: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = issue(folders["worker"].parent, "own", role)
    monkeypatch.setenv(VARIABLE, str(own))
    async with GrpcServer("127.0.0.1", 0) as made:
        done = await asyncio.to_thread(CliRunner().invoke, healthcheck, [f"127.0.0.1:{made.port}"])
        assert done.exit_code == 0, done.output
    listener = JsonListener("a test", "choose another port")

    async def answer(_: web.Request) -> web.Response:
        return web.Response()

    listener.app.router.add_get("/", answer)
    port = await listener.start("127.0.0.1", 0)
    try:
        address = f"http://127.0.0.1:{port}/"
        assert (await asyncio.to_thread(CliRunner().invoke, healthcheck, [address])).exit_code == 0
    finally:
        await listener.close()
    with Impostor(holder(folders, "viewer")) as impostor:
        for address in (impostor.address, f"http://{impostor.address}/"):
            refused = await asyncio.to_thread(CliRunner().invoke, healthcheck, ["--timeout", "1", address])
            assert refused.exit_code == 1
        assert impostor.heard == []


async def test_both_sides_take_renewed_certificates_without_a_restart(
    server: GrpcServer, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Everything of the first authority is replaced; a channel that was open before continues, and new ones verify the
    new one."""
    folder = TlsFolder(folders["worker"])
    channel = RenewedChannel(lambda: open_aio_channel(f"127.0.0.1:{server.port}", folder=folder), folder)
    call = channel.unary_unary("/test.Service/Who")
    assert await call(b"", timeout=DEADLINE_S) == b"worker worker"
    renew(tmp_path / "ca", "worker")
    assert await call(b"", timeout=DEADLINE_S) == b"worker worker"
    other = make_folders(tmp_path / "second", coordinator="coordinator", worker="worker")
    for name in ("coordinator", "worker"):
        shutil.copytree(other[name], folders[name], dirs_exist_ok=True)
    assert await call(b"", timeout=DEADLINE_S) == b"worker worker"
    assert await who(server.port, folders["worker"]) == b"worker worker"
    await channel.close(None)


def test_a_plain_channel_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with open_plain_or_tls("127.0.0.1:1") as channel:
        assert isinstance(channel, grpc.Channel)


async def test_a_service_needs_a_certificate(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(folders["person"]))
    with pytest.raises(InvalidInput, match="a service must present a certificate"):
        GrpcServer("127.0.0.1", 0)


@pytest.mark.parametrize("verbosity", ["", "ERROR"])
def test_a_refused_handshake_is_a_line_of_the_log_unless_grpc_is_told_to_be_silent(
    verbosity: str, folders: dict[str, Path]
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    environment |= {VARIABLE: str(folders["coordinator"])}
    environment |= {"GRPC_VERBOSITY": verbosity} if verbosity else {}
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        port = int(process.stdout.readline())
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                with contextlib.suppress(ConnectionResetError):
                    while stranger.recv(1000):  # until the server has ended it
                        pass
        process.stdin.close()
        said = process.stderr.read()
    assert process.returncode == 0
    assert said.count("Handshake failed") == (0 if verbosity else 5)


@pytest.mark.parametrize("name", ["coordinator", "worker", None])
def test_only_a_workers_certificate_begins_a_control_stream(
    name: str | None, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(folders["coordinator"]))
    presented = {"x509_pem_cert": [(folders[name] / "tls.crt").read_bytes()]} if name else {}
    context = cast(Any, SimpleNamespace(auth_context=lambda: presented, peer=lambda: "ipv4:10.0.0.9:1"))
    if name == "worker":
        check_certificate(context)
        assert identity_of_call(context) == Identity("worker", "worker")
        return
    with pytest.raises(Exception, match=r"a worker (must connect with its certificate|needs the role worker)"):
        check_certificate(context)


async def test_an_http_port_presents_the_newest_certificate(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ssl

    monkeypatch.setenv(VARIABLE, str(folders["coordinator"]))
    listener = JsonListener("a test", "choose another port")

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="here")

    listener.app.router.add_get("/", answer)
    port = await listener.start("127.0.0.1", 0)
    try:
        for number in range(2):
            trusted = ssl.create_default_context(cafile=str(folders["coordinator"] / "ca.crt"))
            async with ClientSession() as session:
                answered = await session.get(f"https://127.0.0.1:{port}/", ssl=trusted)
                assert await answered.text() == "here"
            if not number:
                other = make_folders(tmp_path / "second", coordinator="coordinator")
                shutil.copytree(other["coordinator"], folders["coordinator"], dirs_exist_ok=True)
    finally:
        await listener.close()

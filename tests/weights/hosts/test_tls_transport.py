"""Versions from host to host under TLS, and strangers at a relay's port."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_relays import LearnerHost, LocalClient, address, layout, plan
from tls_folders import make_folders

from paceline.errors import Unavailable
from paceline.groups import Version
from paceline.rate_limited_log import RateLimitedLog
from paceline.tls.authority import issue, make_authority, renew
from paceline.tls.folder import VARIABLE, TlsFolder
from paceline.tls.peers import PeerTls
from paceline.weights.hosts import frames, sending
from paceline.weights.hosts.relay import Relay
from paceline.weights.hosts.transport import TlsTransport, Transport, transport_of

V1, V2 = Version(1, 1), Version(1, 2)


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return make_folders(tmp_path, learner="worker", rollout="worker", coordinator="coordinator")


def transport(folder: Path) -> TlsTransport:
    return TlsTransport(PeerTls(TlsFolder(folder)))


@pytest.fixture
def learner(folders: dict[str, Path]) -> Iterator[LearnerHost]:
    """The learner's host, whose relay speaks TLS."""
    made = LearnerHost(layout(), transport(folders["learner"]))
    yield made
    made.close()


@contextlib.contextmanager
def host(folder: Path) -> Iterator[LocalClient]:
    relay = Relay(transport(folder), "127.0.0.1", silence_s=2.0)
    client = LocalClient(relay)
    try:
        yield client
    finally:
        client.connection.close()
        relay.close()


def test_versions_arrive_before_and_after_certificates_are_renewed(
    learner: LearnerHost, folders: dict[str, Path], tmp_path: Path
) -> None:
    with host(folders["rollout"]) as client:
        client.send(plan=plan(learner.stage(V1)))
        assert client.complete(V1)[0].verified_bytes == learner.manifest.size_bytes
        for name in ("learner", "rollout"):
            renew(tmp_path / "ca", name)
        client.send(plan=plan(learner.stage(V2)))
        assert client.complete(V2)[0].verified_bytes == learner.manifest.size_bytes
    assert learner.relays[0].sender.sent_bytes == 2 * learner.manifest.size_bytes


@pytest.mark.parametrize("who", ["another authority", "expired", "another role", "plain"])
def test_a_stranger_gets_not_even_the_nonce(
    learner: LearnerHost,
    folders: dict[str, Path],
    tmp_path: Path,
    who: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sending, "seldom", RateLimitedLog(logging.getLogger(sending.__name__), 0.0))
    make_authority(tmp_path / "other")
    stranger = {
        "another authority": issue(tmp_path / "other", "rollout", "worker"),
        "expired": issue(tmp_path / "ca", "late", "worker", days=1e-9),
        "another role": folders["coordinator"],
        "plain": folders["person"],
    }[who]
    # The stranger trusts everybody, to find out what the relay sends.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host_name, port = address(learner.relays[0]).split(":")
    connection = socket.create_connection((host_name, int(port)), 10.0)
    with contextlib.closing(connection):
        if who != "plain":
            context.load_cert_chain(stranger / "tls.crt", stranger / "tls.key")
            connection = context.wrap_socket(connection)
        else:
            connection.sendall(b"a request without TLS\n" * 10)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            received = connection.recv(frames.NONCE_BYTES)
            assert received == b"" or who == "plain"  # to plain bytes TLS answers with an alert
            assert len(received) < frames.NONCE_BYTES
    assert learner.relays[0].sender.sent_bytes == 0
    why = {"expired": "expired", "another role": "role coordinator"}.get(who, "TLS")
    deadline_s = time.monotonic() + 60.0
    ended = "the connection to a reader on another host has ended: 127.0.0.1:"
    while not any(ended in line and why in line for line in caplog.messages):
        assert time.monotonic() < deadline_s, caplog.text
        time.sleep(0.01)


@pytest.mark.parametrize("speaks_tls", [True, False])
def test_a_peer_that_resets_its_connection_at_once_keeps_nobody_out(folders: dict[str, Path], speaks_tls: bool) -> None:
    encrypted = transport(folders["learner"])
    listener = (encrypted if speaks_tls else Transport()).listen("127.0.0.1", 0, 10.0)
    where = ("127.0.0.1", listener.port)
    with contextlib.closing(listener):
        for _ in range(3):
            stranger = socket.create_connection(where, 10.0)
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stranger.close()
        with socket.create_connection(where, 10.0) as good:
            channels = []
            while not channels or channels[-1].peer != f"127.0.0.1:{good.getsockname()[1]}":
                channel = listener.accept()
                assert channel is not None
                channels.append(channel)
            for channel in channels:
                channel.close()


def test_a_worker_reads_from_no_stranger(folders: dict[str, Path], tmp_path: Path) -> None:
    make_authority(tmp_path / "other")
    for folder in (issue(tmp_path / "other", "learner", "worker"), folders["coordinator"]):
        stranger = LearnerHost(layout(), transport(folder))
        try:
            with pytest.raises(Unavailable, match="is refused"):
                transport(folders["rollout"]).connect(address(stranger.relays[0]), 10.0)
        finally:
            stranger.close()


def test_the_environment_chooses_the_transport(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert type(transport_of()) is Transport
    monkeypatch.setenv(VARIABLE, str(folders["learner"]))
    assert isinstance(transport_of(), TlsTransport)

"""An authority and its certificates, verified by another library: Python's ssl."""

from __future__ import annotations

import ssl
import threading
from pathlib import Path

import pytest
from tls_folders import old_certificate

from paceline.errors import Conflict, InvalidInput, NotFound
from paceline.tls.authority import LOCAL, issue, issued, make_authority, renew
from paceline.tls.certificates import COORDINATOR_HOST, ROLES, WORKER_HOST, read_certificate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An authority."""
    make_authority(tmp_path / "ca")
    return tmp_path / "ca"


def handshake(server: Path, client: Path, name: str) -> None:
    """Perform a mutual handshake in memory. Raises ssl.SSLError."""
    accepting, connecting = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        ssl.create_default_context(cafile=client / "ca.crt"),
    )
    accepting.load_cert_chain(server / "tls.crt", server / "tls.key")
    accepting.load_verify_locations(server / "ca.crt")
    accepting.verify_mode = ssl.CERT_REQUIRED
    connecting.load_cert_chain(client / "tls.crt", client / "tls.key")
    connecting.verify_flags |= ssl.VERIFY_X509_STRICT
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        accepting.wrap_bio(there, back, server_side=True),
        connecting.wrap_bio(back, there, server_hostname=name),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue


@pytest.mark.parametrize("name", ["10.0.0.2", "rollout.example", "fd00::2", "127.0.0.1", "localhost"])
def test_certificates_of_one_authority_verify_each_other_by_every_host(folder: Path, name: str) -> None:
    server = issue(folder, "coordinator", "coordinator", ["10.0.0.2", "rollout.example", "[fd00::2]"])
    handshake(server, issue(folder, "ann", "operator"), name)


def test_another_host_and_another_authority_are_refused(folder: Path, tmp_path: Path) -> None:
    server, client = issue(folder, "server", "coordinator"), issue(folder, "client", "worker")
    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for"):
        handshake(server, client, "10.0.0.3")
    make_authority(tmp_path / "other")
    stranger = issue(tmp_path / "other", "client", "worker")
    with pytest.raises(ssl.SSLError, match=r"(?i)certificate"):
        handshake(server, stranger, "127.0.0.1")


def test_keys_are_for_their_owner_alone(folder: Path) -> None:
    made = issue(folder, "a", "worker")
    assert [(made / "tls.key").stat().st_mode & 0o777, (folder / "ca.key").stat().st_mode & 0o777] == [
        0o600,
        0o600,
    ]
    assert sorted(path.name for path in made.iterdir()) == ["ca.crt", "tls.crt", "tls.key"]


def test_renewal_keeps_name_role_hosts_and_life_and_changes_the_key(folder: Path) -> None:
    made = issue(folder, "a", "worker", ["a.example"], days=7)
    before, key = read_certificate((made / "tls.crt").read_bytes()), (made / "tls.key").read_bytes()
    assert renew(folder, "a") == made
    after = read_certificate((made / "tls.crt").read_bytes())
    assert (after.name, after.organizations, after.hosts) == (before.name, before.organizations, before.hosts)
    assert abs((after.ends - after.begins) - (before.ends - before.begins)).total_seconds() <= 1
    assert after.serial != before.serial
    assert (made / "tls.key").read_bytes() != key
    handshake(made, made, "a.example")


def test_nothing_is_written_over(folder: Path) -> None:
    issue(folder, "a", "worker")
    with pytest.raises(Conflict, match="already exists"):
        make_authority(folder)
    with pytest.raises(Conflict, match="certs renew"):
        issue(folder, "a", "operator")
    assert [(name, found.organizations) for name, found in issued(folder)] == [("a", ("worker",))]


@pytest.mark.parametrize(
    ("name", "role", "hosts", "fault"),
    [
        ("../a", "worker", [], "the name '../a'"),
        ("a", "boss", [], "'boss' is not a role"),
        ("a", "worker", ["10.0.0.1:7070"], "neither an IP address nor a DNS name; give it without a port"),
    ],
)
def test_wrong_input_is_refused_with_its_value(
    folder: Path, name: str, role: str, hosts: list[str], fault: str
) -> None:
    with pytest.raises(InvalidInput, match=fault):
        issue(folder, name, role, hosts)


@pytest.mark.parametrize("role", ROLES)
def test_loopback_and_the_names_of_roles_are_in_certificates_of_those_roles_alone(folder: Path, role: str) -> None:
    made = issue(folder, "a", role, ["10.0.0.1"])
    hosts = set(read_certificate((made / "tls.crt").read_bytes()).hosts) - {"10.0.0.1"}
    coordinates, works = role in ("coordinator", "up"), role in ("worker", "up")
    assert hosts & set(LOCAL) == (set(LOCAL) if coordinates else set())
    assert (COORDINATOR_HOST in hosts, WORKER_HOST in hosts) == (coordinates, works)


@pytest.mark.parametrize(
    "host",
    [COORDINATOR_HOST, "COORDINATOR.paceline.internal", "*.paceline.internal", "localhost", "a.localhost", "127.0.0.1",
     "127.9.9.9", "[::1]", "::ffff:127.0.0.1", "0.0.0.0"],
)  # fmt: skip
def test_no_other_role_may_name_them(folder: Path, host: str) -> None:
    for role in ("viewer", "worker"):
        with pytest.raises(InvalidInput, match=f"leave it out for the role '{role}'"):
            issue(folder, "a", role, [host])


def test_a_renewed_old_certificate_gains_the_name_of_its_role_and_loses_those_of_others(folder: Path) -> None:
    for name in ("viewer", "worker", "coordinator"):
        made = old_certificate(folder, name, name)
        assert set(LOCAL) <= set(read_certificate((made / "tls.crt").read_bytes()).hosts)
        renewed = read_certificate((renew(folder, name) / "tls.crt").read_bytes())
        expected = {"worker": (WORKER_HOST,), "coordinator": (*LOCAL, COORDINATOR_HOST)}.get(name, ())
        assert set(renewed.hosts) == set(expected)


def test_a_certificate_does_not_outlive_its_authority(tmp_path: Path) -> None:
    make_authority(tmp_path, days=10)
    with pytest.raises(InvalidInput, match="give fewer --days"):
        issue(tmp_path, "a", "worker")


def test_without_an_authority_the_remedy_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="certs init"):
        issue(tmp_path, "a", "worker")
    with pytest.raises(NotFound, match="certs issue"):
        renew(tmp_path, "a")


def test_a_reader_never_sees_half_a_file(folder: Path) -> None:
    made = issue(folder, "a", "worker")
    ended, seen = threading.Event(), []

    def look() -> None:
        while not ended.is_set():
            seen.append((made / "tls.crt").read_bytes().endswith(b"-----END CERTIFICATE-----\n"))

    reader = threading.Thread(target=look)
    reader.start()
    for _ in range(20):
        renew(folder, "a")
    ended.set()
    reader.join()
    assert all(seen)

"""Identities in certificates, also in those of other authorities."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from paceline.errors import InvalidInput
from paceline.tls.authority import issue, make_authority
from paceline.tls.certificates import Identity, identity_of, read_certificate


def pem_of(*names: tuple[x509.ObjectIdentifier, str], days: float = 1.0) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(kind, value) for kind, value in names])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 7, now - timedelta(days=2), now + timedelta(days=days))
    return made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def test_the_common_name_is_the_name_and_the_organization_the_role(tmp_path: Path) -> None:
    make_authority(tmp_path)
    pem = (issue(tmp_path, "rollout-0", "worker") / "tls.crt").read_bytes()
    assert identity_of(pem) == identity_of(pem.decode()) == Identity("rollout-0", "worker")


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        ([(NameOID.ORGANIZATION_NAME, "worker")], "no common name"),
        ([(NameOID.COMMON_NAME, "a")], "organizations .O.: none; it must have one"),
        ([(NameOID.COMMON_NAME, "a"), (NameOID.ORGANIZATION_NAME, "boss")], "boss; it must have one"),
        (
            [
                (NameOID.COMMON_NAME, "a"),
                (NameOID.ORGANIZATION_NAME, "worker"),
                (NameOID.ORGANIZATION_NAME, "operator"),
            ],
            "worker, operator; it must have one",
        ),
    ],
)
def test_a_certificate_without_exactly_one_role_is_refused(
    names: list[tuple[x509.ObjectIdentifier, str]], fault: str
) -> None:
    with pytest.raises(InvalidInput, match=fault):
        identity_of(pem_of(*names))


def test_a_text_without_a_certificate_is_refused() -> None:
    with pytest.raises(InvalidInput, match="not a certificate in PEM format"):
        identity_of(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")


def test_a_certificate_with_a_changed_bit_is_read_or_refused() -> None:
    lines = pem_of((NameOID.COMMON_NAME, "a")).decode().strip().splitlines()
    content, refused = base64.b64decode("".join(lines[1:-1])), 0
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        text = "\n".join([lines[0], base64.encodebytes(changed).decode().strip(), lines[-1]])
        try:
            read_certificate(text)
        except InvalidInput:  # any other error fails this test
            refused += 1
    assert refused > 20


def test_it_is_due_in_the_last_third_of_its_life() -> None:
    # Its life of 2 + `days` days began two days ago.
    assert not read_certificate(pem_of((NameOID.COMMON_NAME, "a"), days=1.1)).is_due
    assert read_certificate(pem_of((NameOID.COMMON_NAME, "a"), days=0.9)).is_due
    expired = read_certificate(pem_of((NameOID.COMMON_NAME, "a"), days=-1.0))
    assert expired.is_due
    assert expired.left_s < 0

"""A certificate authority in a folder, and the certificates that it issues.

    FOLDER/ca.crt, ca.key          the authority; its key stays with the operator
    FOLDER/NAME/tls.crt, tls.key   a certificate; with ca.crt this folder is what a process gets (`--tls-dir`)

Keys are on the curve P-256 and have mode 0600. A file appears whole or not at all. Promise: an authority is never
overwritten, and a renewed certificate keeps its name, role and hosts.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paceline.errors import Conflict, InvalidInput, NotFound
from paceline.tls.certificates import COORDINATOR_HOST, RESERVED, ROLE_HOSTS, ROLES, Certificate, read_certificate

CERTIFICATE, KEY, AUTHORITY, AUTHORITY_KEY = "tls.crt", "tls.key", "ca.crt", "ca.key"
"""File names as in cert-manager's secrets."""
AUTHORITY_DAYS, CERTIFICATE_DAYS = 3650.0, 30.0
LOCAL = ("localhost", "127.0.0.1", "::1")
"""Hosts of a coordinator's certificate. No other certificate has them, because a server on loopback could be anybody's."""
SKEW = timedelta(minutes=5)
"""Time before its issue from which a certificate is valid, because clocks of hosts differ."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
HOST = re.compile(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?")


def make_authority(folder: Path, days: float = AUTHORITY_DAYS) -> Certificate:
    """Make an authority in a folder. Raises Conflict if the folder has an authority."""
    for name in (AUTHORITY, AUTHORITY_KEY):
        if (folder / name).exists():
            raise Conflict(
                f"{folder / name} already exists; use another folder for the certificates of another authority"
            )
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    # The number distinguishes authorities, which verifiers find by name.
    subject = _name(f"paceline {x509.random_serial_number() & 0xFFFFFFFF:08x}")
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    certificate = (
        _builder(subject, subject, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(folder / AUTHORITY_KEY, _pem_of_key(key), 0o600)
    pem = certificate.public_bytes(Encoding.PEM)
    _write(folder / AUTHORITY, pem, 0o644)
    return read_certificate(pem)


def issue(folder: Path, name: str, role: str, hosts: Sequence[str] = (), days: float = CERTIFICATE_DAYS) -> Path:
    """Issue a certificate with a new key and return its folder. `hosts` are the DNS names and IP addresses at which
    others reach the process; a coordinator's certificate also has those of loopback. Raises InvalidInput, NotFound
    without an authority, Conflict for a name that is in use."""
    if not NAME.fullmatch(name):
        raise InvalidInput(f"the name {name[:80]!r} must be 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    if (folder / name / CERTIFICATE).exists():
        raise Conflict(f"{folder / name} already has a certificate; `paceline certs renew {folder} {name}` renews it")
    for host in hosts:
        if not _is_allowed(host, role):
            raise InvalidInput(
                f"--host {host[:80]!r} is a name of coordinators or workers alone; leave it out for the role {role[:80]!r}"
            )
    return _issue(folder, name, role, hosts, days)


def renew(folder: Path, name: str, days: float | None = None) -> Path:
    """Renew a certificate with a new key and return its folder. By default the new certificate is valid for as many
    days as the old one. Names that only other roles may have are left out. Raises NotFound, InvalidInput."""
    path = folder / name / CERTIFICATE
    if not path.is_file():
        raise NotFound(f"{path} does not exist; `paceline certs issue {folder} {name} --role ROLE` makes it")
    before = read_certificate(path.read_bytes())
    lasted_days = (before.ends - before.begins - SKEW) / timedelta(days=1)
    if len(before.organizations) != 1:
        raise InvalidInput(f"{path} gives {len(before.organizations)} roles; issue a certificate with one role")
    role = before.organizations[0]
    hosts = [host for host in before.hosts if _is_allowed(host, role)]
    return _issue(folder, name, role, hosts, days or lasted_days)


def _is_allowed(host: str, role: str) -> bool:
    """Return whether a certificate of this role may have the host: names of a role and of loopback are reserved."""
    own, host = ROLE_HOSTS.get(role, ()), host.strip("[]").lower()
    try:
        address = ipaddress.ip_address(host)
        address = getattr(address, "ipv4_mapped", None) or address
        is_local = address.is_loopback or address.is_unspecified
    except ValueError:
        is_local = f".{host}".endswith(".localhost")
    is_reserved = f".{host}".endswith(f".{RESERVED}") and host not in own
    return not is_reserved and (COORDINATOR_HOST in own or not is_local)


def issued(folder: Path) -> Iterator[tuple[str, Certificate]]:
    """Yield names and certificates in an authority's folder, sorted. Raises InvalidInput for unreadable files."""
    for path in sorted(folder.glob(f"*/{CERTIFICATE}")):
        yield path.parent.name, read_certificate(path.read_bytes())


def _issue(folder: Path, name: str, role: str, hosts: Sequence[str], days: float) -> Path:
    if role not in ROLES:
        raise InvalidInput(f"{role[:80]!r} is not a role; use one of {', '.join(ROLES)}")
    authority, authority_key = _authority(folder)
    own = ROLE_HOSTS.get(role, ())
    common = (*LOCAL, *own) if COORDINATOR_HOST in own else own
    names = [_general_name(host) for host in dict.fromkeys((*common, *hosts))]
    key = ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
    identifier = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = (
        _builder(_name(name, role), authority.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    certificate = builder.sign(authority_key, hashes.SHA256())
    if certificate.not_valid_after_utc > authority.not_valid_after_utc:
        raise InvalidInput(
            f"the certificate would be valid until {certificate.not_valid_after_utc:%Y-%m-%d}, but its authority only "
            f"until {authority.not_valid_after_utc:%Y-%m-%d}; give fewer --days, or make a new authority"
        )
    issued_folder = folder / name
    issued_folder.mkdir(exist_ok=True)
    _write(issued_folder / AUTHORITY, (folder / AUTHORITY).read_bytes(), 0o644)
    _write(issued_folder / KEY, _pem_of_key(key), 0o600)
    _write(issued_folder / CERTIFICATE, certificate.public_bytes(Encoding.PEM), 0o644)
    return issued_folder


def _authority(folder: Path) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    try:
        certificate = x509.load_pem_x509_certificate((folder / AUTHORITY).read_bytes())
        key = serialization.load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), password=None)
    except FileNotFoundError as error:
        raise NotFound(f"{error.filename} does not exist; `paceline certs init {folder}` makes an authority") from None
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"the authority in {folder} cannot be read: {error}") from None
    if not isinstance(key, EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise InvalidInput(f"{folder / AUTHORITY_KEY} is not the key of {folder / AUTHORITY}")
    return certificate, key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(common_name: str, organization: str = "") -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if organization:
        parts.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    return x509.Name(parts)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    if not HOST.fullmatch(host):
        raise InvalidInput(f"--host {host[:80]!r} is neither an IP address nor a DNS name; give it without a port")
    return x509.DNSName(host)


def _pem_of_key(key: EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, content: bytes, mode: int) -> None:
    """Replace a file whole; the new file has `mode` before it has any content."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)

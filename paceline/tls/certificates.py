"""Reads certificates: the holder and its role, the addresses and the time of validity. A certificate names a process or
a person by its common name and gives the role as its organization (`CN=rollout-0, O=worker`), as cert-manager does
with `subject.organizations`. Nothing here decides whether to trust a certificate: TLS has verified the chain."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from paceline.errors import InvalidInput

if TYPE_CHECKING:
    from cryptography import x509

WORKER, COORDINATOR, UP = "worker", "coordinator", "up"
ROLES = ("viewer", "submitter", "operator", WORKER, "scraper", COORDINATOR, UP)
"""Roles that a certificate can give. A coordinator's certificate gives no right at another service; the processes of
one `paceline up`, a coordinator and workers, share the role `up`."""
RESERVED = "paceline.internal"
WORKER_HOST, COORDINATOR_HOST = f"worker.{RESERVED}", f"coordinator.{RESERVED}"
"""Names by which clients verify the role of a server: certificates of other roles lack these names, and no certificate
has the addresses of pods."""
ROLE_HOSTS = {WORKER: (WORKER_HOST,), COORDINATOR: (COORDINATOR_HOST,), UP: (COORDINATOR_HOST, WORKER_HOST)}


@dataclass(frozen=True)
class Identity:
    name: str
    role: str

    @property
    def is_worker(self) -> bool:
        """Return whether the holder may act as a worker."""
        return WORKER_HOST in ROLE_HOSTS.get(self.role, ())


@dataclass(frozen=True)
class Certificate:
    """The first certificate of a PEM text."""

    name: str
    """Common name; empty if the certificate has none."""
    organizations: tuple[str, ...]
    hosts: tuple[str, ...]
    """DNS names and IP addresses for which the certificate is valid."""
    issuer: str
    """Common name of the certificate's issuer."""
    begins: datetime
    ends: datetime
    serial: int

    @property
    def left_s(self) -> float:
        """Return the seconds until the certificate expires; negative afterwards."""
        return (self.ends - datetime.now(UTC)).total_seconds()

    @property
    def is_due(self) -> bool:
        """Return whether less than a third of the certificate's life is left, so that it should be renewed."""
        return self.left_s < (self.ends - self.begins).total_seconds() / 3


def identity_of(pem: bytes | str) -> Identity:
    """Return the name and the role in the first certificate of a PEM text. Raises InvalidInput if the text has no
    certificate, if the certificate has no common name, or if its organizations are not exactly one role."""
    certificate = read_certificate(pem)
    if not certificate.name:
        raise InvalidInput("the certificate has no common name (CN), which is the name of its holder")
    if len(certificate.organizations) != 1 or certificate.organizations[0] not in ROLES:
        has = ", ".join(certificate.organizations)[:200] or "none"
        raise InvalidInput(
            f"the certificate of {certificate.name[:64]!r} has the organizations (O): {has}; it must have one, its role: "
            f"{', '.join(ROLES)}"
        )
    return Identity(certificate.name, certificate.organizations[0])


def why_no_coordinator(pem: bytes | str) -> str:
    """Return why clients do not take the holder of a certificate for a coordinator; empty if they do."""
    certificate = read_certificate(pem)
    if not any(COORDINATOR_HOST in ROLE_HOSTS.get(role, ()) for role in certificate.organizations):
        roles = ", ".join(certificate.organizations)[:200] or "none"
        return (
            f"{certificate.name!r} has the role {roles}; issue a certificate with --role {COORDINATOR}, or for `paceline up`, "
            f"whose processes share one, with --role {UP}"
        )
    if COORDINATOR_HOST not in certificate.hosts:
        return (
            f"{certificate.name!r} was issued without the name {COORDINATOR_HOST}; renew it where its authority is, with this "
            "version's `paceline certs renew`, or add this DNS name with another authority"
        )
    return ""


def read_certificate(pem: bytes | str) -> Certificate:
    """Return the first certificate of a PEM text. Raises InvalidInput for a text that has none."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.x509.oid import NameOID

    try:
        certificate = x509.load_pem_x509_certificate(pem.encode() if isinstance(pem, str) else pem)
        return Certificate(
            name=_first(certificate.subject, NameOID.COMMON_NAME),
            organizations=tuple(
                str(part.value) for part in certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
            ),
            hosts=_hosts(certificate),
            issuer=_first(certificate.issuer, NameOID.COMMON_NAME),
            begins=certificate.not_valid_before_utc,
            ends=certificate.not_valid_after_utc,
            serial=certificate.serial_number,
        )
    except (  # some parts are decoded on access
        *(ValueError, UnsupportedAlgorithm, x509.InvalidVersion),
        *(x509.DuplicateExtension, x509.UnsupportedGeneralNameType),
    ) as error:
        raise InvalidInput(f"this is not a certificate in PEM format: {error}") from None


def _hosts(certificate: x509.Certificate) -> tuple[str, ...]:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    addresses = names.get_values_for_type(x509.IPAddress)
    return (*names.get_values_for_type(x509.DNSName), *map(str, addresses))


def _first(name: x509.Name, kind: x509.ObjectIdentifier) -> str:
    found = name.get_attributes_for_oid(kind)
    return str(found[0].value) if found else ""

"""TLS for servers: credentials and contexts that present a folder's newest certificate, and the peer of a call."""

from __future__ import annotations

import functools
import ssl
from typing import Any
from urllib.parse import unquote

import grpc

from paceline.errors import InvalidInput
from paceline.tls.certificates import Identity, identity_of, read_certificate, why_no_coordinator
from paceline.tls.folder import Material, TlsFolder

MAX_CACHED = 4096
"""Largest number of client certificates whose names are cached."""
MAX_PEERS = 8192
"""Largest number of peers whose addresses are cached."""
MAX_HOST = 64


def server_credentials(folder: TlsFolder, *, mutual: bool) -> grpc.ServerCredentials:
    """Return the credentials of a gRPC port. With `mutual`, clients must present a certificate of the authority;
    without `mutual` no certificate is requested, because gRPC for Python has no optional client certificates. Raises
    InvalidInput; with `mutual` also if the folder's certificate is not a coordinator's."""
    given = _own(folder)
    if mutual and (why := why_no_coordinator(given.certificate)):
        raise InvalidInput(f"clients would refuse a coordinator with {folder.path / 'tls.crt'}: {why}")

    def configuration() -> grpc.ServerCertificateConfiguration:
        authority = given.authority if mutual else None
        return grpc.ssl_server_certificate_configuration([(given.key, given.certificate)], authority)

    def renewed() -> Any:  # the stubs do not allow None, which means no change
        nonlocal given
        newest = _own(folder)
        if newest is given:
            return None
        given = newest
        return configuration()

    return grpc.dynamic_ssl_server_credentials(configuration(), renewed, mutual)


def server_context(folder: TlsFolder) -> ssl.SSLContext:
    """Return the context of an HTTP port; it requests no certificate from clients. Raises InvalidInput."""
    given = _own(folder)
    context = _context(folder)

    def renew(connection: Any, _name: str | None, _context_of: ssl.SSLContext) -> None:
        nonlocal given, context
        newest = _own(folder)
        if newest is not given:
            try:
                given, context = newest, _context(folder)
            except (OSError, ValueError):  # replaced meanwhile; the next connection gets the newest
                return
        connection.context = context

    listening = _context(folder)
    listening.sni_callback = renew
    return listening


def identity_of_call(context: Any) -> Identity | None:
    """Return the identity in a call's client certificate, or None. Raises InvalidInput if the certificate has no role."""
    pem = context.auth_context().get("x509_pem_cert")
    return identity_of(pem[0]) if pem else None


def certificate_name(context: Any) -> str:
    """Return the name in a call's client certificate, which TLS has verified; empty for a call without one."""
    pem = context.auth_context().get("x509_pem_cert")
    return _name_in(pem[0]) if pem else ""


@functools.lru_cache(MAX_CACHED)
def _name_in(pem: bytes) -> str:
    return read_certificate(pem).name


def _own(folder: TlsFolder) -> Material:
    material = folder.read()
    if not material.certificate:
        raise InvalidInput(
            f"{folder.path} has no tls.crt and tls.key, but a service must present a certificate; `paceline certs issue` makes both files"
        )
    return material


def _context(folder: TlsFolder) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(folder.path / "tls.crt", folder.path / "tls.key")
    return context


def address_of(name: str) -> str:
    """Return host:port from gRPC's name of a peer, such as `ipv4:10.0.0.7:5432` or `ipv6:%5B::1%5D:5432`; other names unchanged."""
    kind, colon, address = unquote(name).partition(":")
    return address if colon and kind in ("ipv4", "ipv6") else name


@functools.lru_cache(MAX_PEERS)
def host_of(name: str) -> str:
    """Return the host in gRPC's name of a peer, without an IPv6 scope; an IPv4 address in IPv6 form becomes plain IPv4.
    For other names, such as `unix:/tmp/socket`, return their beginning."""
    kind, _, rest = unquote(name).partition(":")
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0].removeprefix("::ffff:")
    return host if host and kind in ("ipv4", "ipv6") else name[:MAX_HOST]

"""Sentences about a TLS connection that failed: gRPC reports only that there is none.

A second connection is made by Python's ssl, whose errors name the cause. Promise: it sends nothing but a handshake, and takes
`LIMIT_S` at most.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from paceline.errors import InvalidInput
from paceline.tls.certificates import read_certificate
from paceline.tls.folder import Material, ResetSafeSocket, TlsFolder, tls_folder

LIMIT_S = 3.0


def why_no_channel(address: str, folder: TlsFolder | None = None) -> str:
    """Return why TLS, or its absence, keeps this process from the gRPC server at "host:port"; empty where it does not, also
    where nothing listens there. Blocks."""
    host, _, port = address.rpartition(":")
    folder = folder or tls_folder()
    try:
        material = folder.read() if folder is not None else None
        with socket.create_connection((host.strip("[]"), int(port)), LIMIT_S) as connection:
            connection.settimeout(LIMIT_S)
            if folder is None or material is None:
                return _fault_without_tls(address, connection)
            return _fault(address, host.strip("[]"), connection, material, folder.path)
    except InvalidInput as error:
        return str(error)
    except (OSError, ValueError, OverflowError):
        return ""


def _fault_without_tls(address: str, connection: socket.socket) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.sslsocket_class = ResetSafeSocket
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(connection):
            return f"the server at {address} speaks TLS; give the folder with its authority's ca.crt as --tls-dir"
    except OSError:
        return ""


def _fault(address: str, host: str, connection: socket.socket, material: Material, path: Path) -> str:
    if material.certificate and (own := read_certificate(material.certificate)).left_s < 0:
        return f"this process's certificate {path / 'tls.crt'} has expired on {own.ends:%Y-%m-%d %H:%M} UTC; renew it"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.sslsocket_class = ResetSafeSocket
    context.load_verify_locations(cadata=material.authority.decode())
    if material.certificate:
        context.load_cert_chain(path / "tls.crt", path / "tls.key")
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(connection, server_hostname=host) as encrypted:
            if encrypted.recv(1):
                return ""
    except ssl.SSLCertVerificationError as error:
        return (
            f"the certificate of {address} is refused: {error.verify_message}; {_remedy(error, host, path)}"
        )
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_EOF_WHILE_READING"):
            return (
                f"the server at {address} speaks no TLS; start it with --tls-dir, or leave out --tls-dir here"
            )
    except ConnectionResetError:
        pass
    except TimeoutError:
        return ""
    if not material.certificate:
        return (
            f"the server at {address} takes connections with a client certificate alone, and {path} has no tls.crt; name the "
            "coordinator's --people-port, or issue a certificate"
        )
    own = read_certificate(material.certificate)
    return (
        f"the server at {address} refuses the certificate {path / 'tls.crt'} of {own.name!r}, issued by {own.issuer!r}; it has to "
        "be of the authority that the server trusts"
    )


def _remedy(error: ssl.SSLCertVerificationError, host: str, path: Path) -> str:
    if error.verify_code in (62, 64):  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
        return f"issue it with --host {host}"
    if error.verify_code in (9, 10):  # not valid yet, expired
        return "renew it on the server's host, and compare the clocks"
    return f"it has to be of the authority in {path / 'ca.crt'}"

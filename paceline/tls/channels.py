"""gRPC channels that verify the server and its role, and present this process's certificate; without a folder of
certificates they are plain. A server must present a certificate with the name of its role
(`paceline.tls.certificates`), a coordinator's by default; its address is not compared. So a call, and the token in it,
never reaches the holder of another certificate. A channel keeps the certificate with which it was opened, so
`RenewedChannel` opens another one for calls that begin after the files have changed; running calls end on the old
channel. gRPC does not report why a TLS connection failed, so `why_no_channel` makes a second connection with Python's
ssl, whose errors name the cause. Promise: `why_no_channel` sends nothing but a handshake, and takes at most
`LIMIT_S`."""

from __future__ import annotations

import inspect
import socket
import ssl
import threading
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidInput
from paceline.tls.certificates import COORDINATOR_HOST, WORKER_HOST, read_certificate, why_no_coordinator
from paceline.tls.folder import Material, ResetSafeSocket, TlsFolder, tls_folder

if TYPE_CHECKING:
    import grpc

NAME_OPTION = "grpc.ssl_target_name_override"
TO_WORKER = ((NAME_OPTION, WORKER_HOST),)
"""Options of a channel to a worker."""
MAX_OLD = 2
"""Largest number of channels with earlier certificates whose calls may still be under way; older channels are
closed."""


def channel_credentials(material: Material) -> grpc.ChannelCredentials:
    """Return the credentials of a channel. The server must have a certificate from the authority."""
    import grpc

    return grpc.ssl_channel_credentials(material.authority, material.key or None, material.certificate or None)


def with_role(options: Any) -> tuple[Any, ...]:
    """Return a channel's options, by which the server must be a coordinator unless they name another role's host."""
    named = any(name == NAME_OPTION for name, _ in options or ())
    return (*(options or ()), *(() if named else ((NAME_OPTION, COORDINATOR_HOST),)))


def open_plain_or_tls(address: str, options: Any = (), folder: TlsFolder | None = None) -> grpc.Channel:
    """Return a channel with the current certificates. Raises InvalidInput for a folder that cannot be read."""
    import grpc

    folder = folder or tls_folder()
    if folder is None:
        return grpc.insecure_channel(dialled(address), options=options)
    return grpc.secure_channel(address, channel_credentials(folder.read()), options=with_role(options))


def open_aio_channel(address: str, options: Any = (), folder: TlsFolder | None = None) -> grpc.aio.Channel:
    """Return an asyncio channel with the current certificates. Raises InvalidInput for a folder that cannot be read."""
    import grpc

    folder = folder or tls_folder()
    if folder is None:
        return grpc.aio.insecure_channel(dialled(address), options=options)
    return grpc.aio.secure_channel(address, channel_credentials(folder.read()), options=with_role(options))


def dialled(address: str) -> str:
    """Return the address with 127.0.0.1 for `localhost`, because a server compares the host of its callers."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host.lower().rstrip(".") == "localhost" else address


class RenewedChannel:
    """The part of a channel that stubs use; each call begins on a channel with the newest certificates."""

    def __init__(self, opened: Callable[[], Any], folder: TlsFolder | None = None):
        """`opened` opens a channel, plain or of asyncio. Raises InvalidInput for a folder that cannot be read."""
        self._opened, self._folder = opened, folder or tls_folder()
        self._material = self._folder.read() if self._folder is not None else None
        self._channels = [opened()]
        self._is_closed, self._lock = False, threading.Lock()

    def close(self, *grace: float | None) -> Any:
        """End all running calls. Return an asyncio channel's awaitable; older channels end with their last call."""
        self._is_closed = True
        *old, newest = self._channels
        for channel in old:
            self._end(channel)
        return newest.close(*grace)

    @staticmethod
    def _end(channel: Any) -> None:
        """Close a channel. An asyncio channel, whose `close` is a coroutine, closes when it is no longer referenced."""
        if not inspect.iscoroutinefunction(channel.close):
            channel.close()

    def _method(self, kind: str, *method: Any, **how: Any) -> Callable[..., Any]:
        """Return a function that makes calls of a method; the stub's callable is created once for each channel."""
        newest = self._channels[-1]
        call = getattr(newest, kind)(*method, **how)

        def renewed() -> Any:
            nonlocal newest, call
            if (current := self._current()) is not newest:
                newest, call = current, getattr(current, kind)(*method, **how)
            return call

        def begin(*given: Any, **options: Any) -> Any:
            return renewed()(*given, **options)

        begin.with_call = lambda *given, **options: renewed().with_call(*given, **options)  # type: ignore[attr-defined]
        return begin

    unary_unary = partialmethod(_method, "unary_unary")
    unary_stream = partialmethod(_method, "unary_stream")
    stream_unary = partialmethod(_method, "stream_unary")
    stream_stream = partialmethod(_method, "stream_stream")

    def _current(self) -> Any:
        if self._folder is None or self._is_closed:  # gRPC itself refuses a call on a closed channel
            return self._channels[-1]
        with self._lock:
            if (material := self._folder.read()) is not self._material:
                self._material = material
                self._channels.append(self._opened())
                if len(self._channels) > MAX_OLD + 1:
                    self._end(self._channels.pop(0))
            return self._channels[-1]


LIMIT_S = 3.0


def why_no_channel(address: str, folder: TlsFolder | None = None) -> str:
    """Return why TLS, or its lack, keeps this process from the coordinator at "host:port"; empty if it does not.
    Blocks."""
    host, _, port = address.rpartition(":")
    folder = folder or tls_folder()
    try:
        material = folder.read() if folder is not None else None
        with socket.create_connection((host.strip("[]"), int(port)), LIMIT_S) as connection:
            connection.settimeout(LIMIT_S)
            if folder is None or material is None:
                return _fault_without_tls(address, connection)
            return _fault(address, connection, material, folder.path)
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
            return f"the server at {address} uses TLS; give the folder with its authority's ca.crt as --tls-dir"
    except OSError:
        return ""


def _fault(address: str, connection: socket.socket, material: Material, path: Path) -> str:
    if material.certificate and (own := read_certificate(material.certificate)).left_s < 0:
        return f"this process's certificate {path / 'tls.crt'} expired on {own.ends:%Y-%m-%d %H:%M} UTC; renew it"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.sslsocket_class = ResetSafeSocket
    context.check_hostname = False
    context.load_verify_locations(cadata=material.authority.decode())
    if material.certificate:
        context.load_cert_chain(path / "tls.crt", path / "tls.key")
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(connection, server_hostname=COORDINATOR_HOST) as encrypted:
            presented = ssl.DER_cert_to_PEM_cert(encrypted.getpeercert(binary_form=True) or b"")
            if why := why_no_coordinator(presented):
                return f"the server at {address} gets no token, because its certificate is not a coordinator's: {why}"
            if encrypted.recv(1):
                return ""
    except ssl.SSLCertVerificationError as error:
        return f"the certificate of {address} is refused: {error.verify_message}; {_remedy(error, path)}"
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_EOF_WHILE_READING"):
            return f"the server at {address} does not use TLS; start it with --tls-dir, or leave out --tls-dir here"
    except ConnectionResetError:
        pass
    except TimeoutError:
        return ""
    if not material.certificate:
        return (
            f"the server at {address} requires a client certificate, and {path} has no tls.crt; name the "
            "coordinator's --people-port, or issue a certificate"
        )
    own = read_certificate(material.certificate)
    return (
        f"the server at {address} refuses the certificate {path / 'tls.crt'} of {own.name!r}, issued by "
        f"{own.issuer!r}; use a certificate of the authority that the server trusts"
    )


def _remedy(error: ssl.SSLCertVerificationError, path: Path) -> str:
    if error.verify_code in (9, 10):  # not valid yet, expired
        return "renew it on the server's host, and compare the clocks"
    return f"use one of the authority in {path / 'ca.crt'}"

"""The base of all gRPC servers of Paceline: reflection, health, limits, errors as statuses, a graceful stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from paceline.calls.backoff import to_metadata
from paceline.errors import Busy, Conflict, PacelineError
from paceline.host.process import end_process
from paceline.rate_limited_log import SeldomFilter, unforeseen
from paceline.services.common.access.insecure import REMIND_S, insecurity
from paceline.services.common.access.tls import server_credentials
from paceline.services.common.access.token_guard import TokenGuard, status_of
from paceline.services.common.serving.call_limits import CallLimits, OutermostInterceptor
from paceline.services.common.serving.endpoints import in_brackets
from paceline.tls.folder import TlsFolder, tls_folder
from paceline.user_code.left_over import end_strays

MAX_MESSAGE_BYTES = 64 << 20
"""Largest gRPC message in either direction; manifests of weights are the largest messages."""
MAX_DETAILS_BYTES = 4096
"""Largest text of a status in bytes, where a byte beyond printable ASCII counts as three; gRPC refuses more."""
HANDSHAKE_S = 10.0
"""Seconds in which a new connection must complete its handshakes for TLS and HTTP/2."""
IDLE_S = 60.0
"""Seconds after which a connection without a call is closed; a channel opens a new connection when it needs one.
Otherwise strangers could occupy all connections of a port."""
MAX_STREAMS = 4096
"""Largest number of calls in progress on one connection; a channel delays further calls."""
MAX_CONNECTIONS = 4096
"""Default of the largest number of connections to each port of a server; a further connection is closed at once."""
STOP_GRACE_S = 1.0
"""Seconds that calls in progress have when the service ends."""
LIMITS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]
CHANNEL_OPTIONS = [
    *LIMITS,
    # A connection on which nothing came for 15 s is closed. gRPC uses the ping's time-out, whatever the keepalive's is.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # limit of one attempt to connect
]
SERVER_OPTIONS = [
    *LIMITS,
    ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_S)),
    ("grpc.max_connection_idle_ms", int(1000 * IDLE_S)),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    # Later than the heartbeats' time-out, because a broken stream counts as a crash but a silent worker does not.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
]
GRPC_LOG = "grpc._cython.cygrpc"
"""Name of the logger for gRPC's traceback of each request that cannot be decoded."""

seldom = SeldomFilter()
log = logging.getLogger(__name__)
CallT = TypeVar("CallT", bound=Callable[..., Awaitable[Any]])
StreamT = TypeVar("StreamT", bound=Callable[..., AsyncIterator[Any]])


def with_status(call: CallT) -> CallT:
    """Wrap a unary method: a PacelineError becomes a status with its message, any other error becomes INTERNAL and a
    log line."""

    @functools.wraps(call)
    async def wrapped(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await call(self, request, context)
        except (grpc.aio.AbortError, grpc.RpcError):
            raise
        except Exception as error:
            await context.abort(*_status(call.__name__, error, context))

    return wrapped  # type: ignore[return-value]


def with_stream_status(call: StreamT) -> StreamT:
    """Wrap a method that answers with a stream, like `with_status`."""

    @functools.wraps(call)
    async def wrapped(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            async with contextlib.aclosing(call(self, request, context)) as responses:  # type: ignore[type-var]
                async for response in responses:
                    yield response
        except (grpc.aio.AbortError, grpc.RpcError):
            raise
        except Exception as error:
            await context.abort(*_status(call.__name__, error, context))

    return wrapped  # type: ignore[return-value]


def _status(method: str, error: Exception, context: Any) -> tuple[grpc.StatusCode, str, tuple[Any, ...]]:
    if (code := status_of(error)) is not None:
        if not isinstance(error, Busy):
            return code, details_of(str(error)), ()  # keeps the metadata that the token guard has set
        hint = (*to_metadata(error.retry_after_s), *(context.trailing_metadata() or ()))
        return code, details_of(str(error)), hint
    return grpc.StatusCode.INTERNAL, details_of(unforeseen.note(method, error)), ()


def details_of(text: str) -> str:
    size = 0
    kept: list[str] = []
    for character in text:
        data = character.encode("utf-8", "replace")
        size += len(data) if character.isascii() and character.isprintable() and character != "%" else 3 * len(data)
        if size > MAX_DETAILS_BYTES - 16:
            return "".join(kept) + " [...]"
        kept.append(character)
    return text


class GrpcServer:
    """A gRPC server with its services, which uses TLS if the environment names a folder with certificates."""

    def __init__(
        self,
        host: str,
        port: int,
        guard: TokenGuard | None = None,
        max_connections: int = MAX_CONNECTIONS,
        *,
        mutual: bool = False,
        people_port: int | None = None,
        options: Sequence[tuple[str, int]] = SERVER_OPTIONS,
    ):
        """`guard` checks every call first, then `CallLimits` do. A connection beyond `max_connections` to a port is
        closed at once. Under TLS, `mutual` accepts only clients with a certificate, and `people_port` is a second
        port for other clients. Raises Conflict if a port is taken, InvalidInput for unusable certificates."""
        logging.getLogger(GRPC_LOG).addFilter(seldom)
        # The guard runs before the limits, because they count by the caller that it identifies.
        interceptors: list[Any] = [OutermostInterceptor(), *([guard] if guard else []), CallLimits()]
        limit = ("grpc.max_allowed_incoming_connections", max_connections)
        self._server = grpc.aio.server(interceptors=interceptors, options=[*options, limit])
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names = [health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME]
        self.host = host
        self._reminding: asyncio.Task[None] | None = None
        folder = tls_folder()
        self.port = self._listen(port, folder, mutual)
        self.people_port = None if people_port is None else self._listen(people_port, folder, False)
        if guard is not None:
            guard.sessions.ports = frozenset(each for each in (self.port, self.people_port) if each)
            found = socket.getaddrinfo(host.strip("[]"), self.port, type=socket.SOCK_STREAM)
            guard.sessions.hosts = frozenset(str(each[4][0]) for each in found)

    def _listen(self, port: int, folder: TlsFolder | None, mutual: bool) -> int:
        # Checked before gRPC tries, because gRPC writes a line to stderr.
        if port and _is_taken(self.host, port):
            raise _taken(self.host, port)
        address = f"{in_brackets(self.host)}:{port}"
        try:
            if folder is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, server_credentials(folder, mutual=mutual))
        except RuntimeError:
            raise _taken(self.host, port) from None

    def add(self, servicer: Any, register: Callable[[Any, grpc.aio.Server], None], name: str) -> None:
        """Add a service by its generated registration function and its full name."""
        register(servicer, self._server)
        self._names.append(name)

    async def start(self) -> None:
        """Listen, and set the health to SERVING."""
        reflection.enable_server_reflection(self._names, self._server)
        for name in ("", *self._names):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()
        self._reminding = asyncio.create_task(remind(insecurity(self.host)))

    async def set_serving(self, name: str, serving: bool) -> None:
        """Set the health of one service, which tells whether the service can work. The health of the process does not
        change."""
        states = health_pb2.HealthCheckResponse
        await self._health.set(name, states.SERVING if serving else states.NOT_SERVING)

    async def __aenter__(self) -> GrpcServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop(STOP_GRACE_S)

    async def stop(self, grace_s: float) -> None:
        """Set the health to NOT_SERVING; calls in progress have `grace_s` seconds to end."""
        if self._reminding is not None:
            self._reminding.cancel()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def _taken(host: str, port: int) -> Conflict:
    return Conflict(f"cannot listen on {host}:{port}; is another process there? Choose another port")


def _is_taken(host: str, port: int) -> bool:
    """Return whether another process listens on the port. False also if only an attempt to listen can show that."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return False
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def run_service(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run `main` with an event that SIGTERM and SIGINT set, after which `main` should end. A PacelineError ends the
    process with its message and status 1, any other exception with its traceback. A thread that still waits THREADS_S
    after the end of `main` (for example for a server that never answers) ends with the process; then the status is
    1."""
    overdue = threading.Timer(THREADS_S, _end_with_threads)
    overdue.daemon = True

    async def run() -> None:
        try:
            await _until_signal(main)
        except BaseException as error:
            overdue.args = (error,)
            raise
        finally:
            overdue.start()

    try:
        asyncio.run(run())
    except PacelineError as error:
        raise click.ClickException(str(error)) from None
    except ExceptionGroup as group:
        fault: Exception | None = group.subgroup(PacelineError)
        if fault is None:
            raise
        while isinstance(fault, ExceptionGroup):
            fault = fault.exceptions[0]
        raise click.ClickException(str(fault)) from None
    finally:
        overdue.cancel()


THREADS_S = 10.0


def _end_with_threads(error: BaseException | None = None) -> None:
    why = f": {error}" if error is not None else ""
    log.warning("a thread did not end within %g s, and the process ends without it%s", THREADS_S, why)
    end_strays()
    end_process(1)


async def _until_signal(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await main(stop)


async def remind(sentence: str, period_s: float = REMIND_S) -> None:
    """Log a warning, now and every `period_s` seconds, until cancelled; return at once if the warning is empty."""
    while sentence:
        log.warning("%s", sentence)
        await asyncio.sleep(period_s)


ACCEPTED_KEY = "paceline-accepted"
ACCEPTED = ((ACCEPTED_KEY, "1"),)
"""Key in a response's initial metadata with which a rollout worker marks that it has started the request. Only a marked
call that ends without an answer was lost in the middle of the work."""


async def was_accepted(call: Any) -> bool:
    """Wait for a call's initial metadata or its end; return whether the worker has accepted the request."""
    return ACCEPTED_KEY in dict(await call.initial_metadata() or ())

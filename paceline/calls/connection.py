"""Connects to one coordinator: checks its address, opens a channel, and makes calls with a deadline that are retried
while the coordinator is away. Failures are errors of paceline.errors with a message for the caller, never bare gRPC
errors."""

from __future__ import annotations

import ipaddress
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from paceline.calls.backoff import ExponentialBackoff, from_error
from paceline.calls.token import open_channel
from paceline.errors import (
    USUAL_S,
    AccessDenied,
    Busy,
    Conflict,
    InvalidInput,
    NotFound,
    NotPermitted,
    PacelineError,
    Unavailable,
)
from paceline.tls.channels import why_no_channel
from paceline.tls.folder import TlsFolder, tls_folder

if TYPE_CHECKING:
    import grpc

    from paceline.calls.proof import Credential

FORM = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5})")


def checked_address(text: str, what: str = "--coordinator") -> str:
    """Return the address unchanged. Raises InvalidInput unless it is HOST:PORT (an IPv6 host in brackets)."""
    match = FORM.fullmatch(text)
    if not match or not 0 < int(match[2]) < 65536:
        raise InvalidInput(f"{what} {text!r} is malformed; write HOST:PORT, such as 127.0.0.1:7070 or [::1]:7070")
    return text


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


ERRORS = {
    "INVALID_ARGUMENT": InvalidInput,
    "NOT_FOUND": NotFound,
    "FAILED_PRECONDITION": Conflict,
    "RESOURCE_EXHAUSTED": Busy,
    "UNAUTHENTICATED": AccessDenied,
    "PERMISSION_DENIED": NotPermitted,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": Unavailable,
    "CANCELLED": Unavailable,
}
"""Maps the name of a gRPC error's status to the class of our error. Every other status becomes a PacelineError."""
LASTING = (
    "NOT_FOUND",
    "INVALID_ARGUMENT",
    "UNIMPLEMENTED",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
)
"""Statuses of failures that a retry of the call would repeat."""


def status_name(error: grpc.RpcError) -> str:
    """Return the name of a gRPC error's status, such as UNAVAILABLE."""
    code = getattr(error, "code", lambda: None)()
    return str(code.name) if code is not None else "UNKNOWN"


def translated(
    error: grpc.RpcError, coordinator: str, other: str | None = None, folder: TlsFolder | None = None
) -> PacelineError:
    """Return the error that the caller gets in place of a gRPC error. `coordinator` is the coordinator's address.
    `other` names a worker, if a worker was called instead. `folder` has the caller's certificates."""
    name = status_name(error)
    details = str(getattr(error, "details", lambda: error)() or error)
    if name == "UNAVAILABLE" and other is None and (fault := why_no_channel(coordinator, folder)):
        return Unavailable(fault)
    if name == "UNAVAILABLE" and other is None:
        return Unavailable(
            f"no coordinator answers at {coordinator}; start one with `paceline serve coordinator` or name "
            "another with --coordinator"
        )
    if name == "UNIMPLEMENTED" and other is None:
        return PacelineError(f"the Paceline of the coordinator at {coordinator} lacks this call; update Paceline there")
    if name in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
        return Unavailable(f"the {other or f'coordinator at {coordinator}'} does not answer: {details}")
    if name == "RESOURCE_EXHAUSTED":
        return Busy(details, from_error(error) or USUAL_S)
    found: type[PacelineError] = ERRORS.get(name, PacelineError)
    return found(details)


FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0
BUSY_S = 5.0
"""Shortest time in seconds to retry a call while the coordinator has no room; the coordinator sets each pause."""
OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # without it, the keepalive time-out closes no connection
)
T = TypeVar("T")


class Connection:
    """The channel to a coordinator. Safe to use from several threads."""

    def __init__(self, address: str, timeout_s: float, wait_s: float, token_file: Path | None, tls_dir: Path | None):
        """Take the arguments of `paceline.client.Client`, which has the defaults."""
        self.address = checked_address(address)
        self._timeout_s = timeout_s
        self._wait_s = wait_s
        self._closed = threading.Event()
        self._token_file = token_file
        self._tls = tls_folder(tls_dir)
        self._channel = self._channel_to(address)

    def close(self) -> None:
        """End the running calls of all threads; each of these calls raises Unavailable."""
        self._closed.set()
        self._channel.close()

    def _channel_to(
        self, address: str, options: tuple[tuple[str, str], ...] = (), known: Callable[[], Credential] | None = None
    ) -> grpc.Channel:
        return open_channel(address, self._token_file, (*OPTIONS, *options), self._tls, known=known)

    def _call(self, call: Callable[[], T], other: str | None = None, wait_s: float | None = None) -> T:
        """Return the call's result. A call is retried for `wait_s` seconds (default: the client's) while the
        coordinator is away, and for BUSY_S or longer while it has no room. A worker (`other`) is called once."""
        wait_s = self._wait_s if wait_s is None else wait_s
        deadline_s = time.monotonic() + (0.0 if other else wait_s)
        busy_until_s = max(deadline_s, time.monotonic() + (0.0 if other else BUSY_S))
        backoff = ExponentialBackoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        while True:
            try:
                return self._call_once(call, other)
            except Busy as busy:
                if time.monotonic() + busy.retry_after_s > busy_until_s or self._closed.wait(busy.retry_after_s):
                    raise
            except Unavailable:
                if time.monotonic() >= deadline_s or self._closed.wait(backoff.next_s()):
                    raise

    def _call_once(self, call: Callable[[], T], other: str | None) -> T:
        import grpc

        try:
            return call()
        except grpc.RpcError as error:
            raise self._translated(error, other) from None
        except ValueError:
            if self._closed.is_set():  # gRPC raises it for a call on a closed channel
                raise Unavailable(f"the client of {self.address} is closed") from None
            raise

    def _translated(self, error: grpc.RpcError, other: str | None = None) -> PacelineError:
        if self._closed.is_set():
            return Unavailable(f"the client of {self.address} is closed")
        return translated(error, self.address, other, self._tls)

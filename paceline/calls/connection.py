"""A connection to one coordinator: its channel, and calls with a deadline that are repeated while it is away.

A fault is one of paceline.errors with a message for the caller, never a bare gRPC error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from paceline.calls.address import checked_address
from paceline.calls.backoff import ExponentialBackoff
from paceline.calls.rpc_errors import translated
from paceline.calls.token import open_channel
from paceline.errors import Busy, PacelineError, Unavailable
from paceline.tls.folder import tls_folder

if TYPE_CHECKING:
    import grpc

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0
BUSY_S = 5.0
"""Seconds for which a call is repeated that the coordinator has no room for, at the pace that it asks for."""
OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # the keepalive's time-out alone ends nothing
)
T = TypeVar("T")


class Connection:
    """The channel to a coordinator. Safe to use from several threads."""

    def __init__(
        self, address: str, timeout_s: float, wait_s: float, token_file: Path | None, tls_dir: Path | None
    ):
        """As `paceline.client.Client`, which has the defaults."""
        self.address = checked_address(address)
        self._timeout_s = timeout_s
        self._wait_s = wait_s
        self._closed = threading.Event()
        self._token_file = token_file
        self._tls = tls_folder(tls_dir)
        self._channel = self._channel_to(address)

    def close(self) -> None:
        """End all running calls, in every thread; they raise Unavailable."""
        self._closed.set()
        self._channel.close()

    def _channel_to(self, address: str) -> grpc.Channel:
        return open_channel(address, self._token_file, OPTIONS, self._tls)

    def _call(self, call: Callable[[], T], other: str | None = None, wait_s: float | None = None) -> T:
        """Return the call's result. The call is repeated while the coordinator is away, `wait_s` seconds at most
        (default: the client's); a worker (`other`) is called once. A coordinator that has no room is called again when it
        says so, for BUSY_S at least."""
        wait_s = self._wait_s if wait_s is None else wait_s
        deadline_s = time.monotonic() + (0.0 if other else wait_s)
        busy_until_s = max(deadline_s, time.monotonic() + (0.0 if other else BUSY_S))
        backoff = ExponentialBackoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        while True:
            try:
                return self._call_once(call, other)
            except Busy as busy:
                if time.monotonic() + busy.retry_after_s > busy_until_s or self._closed.wait(
                    busy.retry_after_s
                ):
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
            if self._closed.is_set():  # grpc's word for a call on a closed channel
                raise Unavailable(f"the client of {self.address} is closed") from None
            raise

    def _translated(self, error: grpc.RpcError, other: str | None = None) -> PacelineError:
        """Return the error that the caller should see in place of a gRPC one."""
        if self._closed.is_set():
            return Unavailable(f"the client of {self.address} is closed")
        return translated(error, self.address, other, self._tls)

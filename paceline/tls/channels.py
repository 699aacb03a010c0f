"""gRPC channels that verify the server and present this process's certificate, or are plain where there is no folder.

A channel keeps the certificate that it was opened with. So `RenewedChannel` opens another one for the calls that begin after the
files have changed; calls under way end on the old one.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import partialmethod
from typing import TYPE_CHECKING, Any

from paceline.tls.folder import Material, TlsFolder, tls_folder

if TYPE_CHECKING:
    import grpc

MAX_OLD = 2
"""Channels with earlier certificates whose calls may still be under way; the one before them is closed."""


def channel_credentials(material: Material) -> grpc.ChannelCredentials:
    """Return the credentials of a channel. The server has to have a certificate of the authority for the host that was dialled."""
    import grpc

    return grpc.ssl_channel_credentials(
        material.authority, material.key or None, material.certificate or None
    )


def open_plain_or_tls(address: str, options: Any = (), folder: TlsFolder | None = None) -> grpc.Channel:
    """Return a channel with the certificates of now. Raises InvalidInput for a folder that cannot be read."""
    import grpc

    folder = folder or tls_folder()
    if folder is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, channel_credentials(folder.read()), options=options)


def open_aio_channel(address: str, options: Any = (), folder: TlsFolder | None = None) -> grpc.aio.Channel:
    """Return a channel for asyncio with the certificates of now. Raises InvalidInput for a folder that cannot be read."""
    import grpc

    folder = folder or tls_folder()
    if folder is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, channel_credentials(folder.read()), options=options)


class RenewedChannel:
    """The part of a channel that stubs use; each call begins on a channel with the newest certificates."""

    def __init__(self, opened: Callable[[], Any], folder: TlsFolder | None = None):
        """`opened` opens a channel, of either kind. Raises InvalidInput for a folder that cannot be read."""
        self._opened, self._folder = opened, folder or tls_folder()
        self._material = self._folder.read() if self._folder is not None else None
        self._channels = [opened()]
        self._is_closed, self._lock = False, threading.Lock()

    def close(self, *grace: float | None) -> Any:
        """End all running calls. Of asyncio's channels, return the awaitable of the newest; the others end with their last call."""
        self._is_closed = True
        *old, newest = self._channels
        for channel in old:
            self._end(channel)
        return newest.close(*grace)

    @staticmethod
    def _end(channel: Any) -> None:
        """Close a channel; one of asyncio, whose `close` is to be awaited, closes when nothing refers to it."""
        if not inspect.iscoroutinefunction(channel.close):
            channel.close()

    def _method(self, kind: str, *method: Any, **how: Any) -> Callable[..., Any]:
        """Return a call that is made once for each channel."""
        newest = self._channels[-1]
        call = getattr(newest, kind)(*method, **how)

        def begin(*given: Any, **options: Any) -> Any:
            nonlocal newest, call
            if (current := self._current()) is not newest:
                newest, call = current, getattr(current, kind)(*method, **how)
            return call(*given, **options)

        return begin

    unary_unary = partialmethod(_method, "unary_unary")
    unary_stream = partialmethod(_method, "unary_stream")
    stream_unary = partialmethod(_method, "stream_unary")
    stream_stream = partialmethod(_method, "stream_stream")

    def _current(self) -> Any:
        if self._folder is None or self._is_closed:  # gRPC refuses a call on a closed channel itself
            return self._channels[-1]
        with self._lock:
            if (material := self._folder.read()) is not self._material:
                self._material = material
                self._channels.append(self._opened())
                if len(self._channels) > MAX_OLD + 1:
                    self._end(self._channels.pop(0))
            return self._channels[-1]

"""The side of a relay that other hosts read from: each piece goes out as soon as it was verified here.

The promise: a reader gets something at least every `WAIT_S`, so that it can tell a host that waits from one that is dead; and
a reader that takes nothing costs a thread for the transport's time-out, and nobody else anything.

Threads: one accepts, one for each channel. They wait for the store's condition and for their channels.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
import time

from paceline.errors import PacelineError
from paceline.rate_limited_log import RateLimitedLog
from paceline.v1 import host_agent_pb2
from paceline.weights.hosts import frames
from paceline.weights.hosts.frames import Kind
from paceline.weights.hosts.manifest import version_of
from paceline.weights.hosts.store import HeldVersion, HostStore
from paceline.weights.hosts.transport import Channel, Listener

WAIT_S = 0.2
MAX_STREAMS = 64
MAX_CHANNELS = 1024
"""Channels at one time; further ones are closed at once."""

seldom = RateLimitedLog(logging.getLogger(__name__))


class Sender:
    """Serves the versions of `store` to relays that prove to know the secret of the present run."""

    def __init__(self, store: HostStore, listener: Listener) -> None:
        self._store, self._listener = store, listener
        self._admitted: tuple[str, bytes] = "", b""
        """The present run and its secret; before a plan comes nobody is admitted."""
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        self.sent_bytes = 0
        """Bytes of pieces sent so far."""
        threading.Thread(target=self._accept, name="weights-accept", daemon=True).start()

    def admit_readers_of(self, run_id: str, secret: bytes) -> None:
        """Let the readers of this run in from now on, and no others."""
        self._admitted = run_id, secret

    def close(self) -> None:
        """Take no more readers, and end the present ones."""
        self._listener.close()
        with self._lock:
            channels = list(self._channels)
        for channel in channels:
            channel.close()

    def _accept(self) -> None:
        while (channel := self._listener.accept()) is not None:
            with self._lock:
                if len(self._channels) >= MAX_CHANNELS:
                    channel.close()
                    continue
                self._channels.add(channel)
            threading.Thread(target=self._serve, args=(channel,), name="weights-send", daemon=True).start()

    def _serve(self, channel: Channel) -> None:
        try:
            nonce = secrets.token_bytes(frames.NONCE_BYTES)
            channel.send(nonce)
            request = frames.receive_request(channel)
            refusal = self._refusal(request, nonce)
            if refusal:
                seldom.warning("refused", "refused a reader at %s: %s", channel.peer, refusal)
                frames.send_frame(channel, Kind.REFUSED, data=refusal.encode())
            elif request.manifest:
                self._send_manifest(channel, request)
            else:
                self._send_pieces(channel, request)
        except PacelineError as error:
            seldom.warning("reader", "a reader on another host is gone: %s", error)
        finally:
            channel.close()
            with self._lock:
                self._channels.discard(channel)

    def _refusal(self, request: host_agent_pb2.ReadRequest, nonce: bytes) -> str:
        if request.protocol != frames.PROTOCOL:
            return f"this agent speaks protocol {frames.PROTOCOL}, not {request.protocol}"
        run_id, secret = self._admitted
        is_known = bool(secret) and request.run_id == run_id
        if not is_known or not hmac.compare_digest(frames.proof(secret, nonce), request.proof):
            return f"no proof that its sender belongs to run {request.run_id[:80]!r}"
        if not request.manifest and not 0 <= request.stream < request.streams <= MAX_STREAMS:
            return f"stream {request.stream} of {request.streams}; at most {MAX_STREAMS} are served"
        return ""

    def _awaited(self, channel: Channel, request: host_agent_pb2.ReadRequest) -> HeldVersion | None:
        """Return the version, once it begins to arrive here; None when it will not."""
        version = version_of(request)
        store, alive = self._store, _SignOfLife()
        while True:
            with store.changed:
                held = store.find(request.run_id, version)
                if held is not None and held.is_current:
                    return held
                if store.closed or store.run_id != request.run_id or not store.will_come(version):
                    return None
                store.changed.wait(WAIT_S)
            alive.sign(channel)

    def _send_manifest(self, channel: Channel, request: host_agent_pb2.ReadRequest) -> None:
        held, alive = self._awaited(channel, request), _SignOfLife()
        while held is not None and held.is_current:
            with self._store.changed:
                if not held.manifest_bytes:
                    self._store.changed.wait(WAIT_S)
                data = held.manifest_bytes
            if data:
                frames.send_frame(channel, Kind.MANIFEST, data=data)
                return
            alive.sign(channel)
        frames.send_frame(channel, Kind.GONE)

    def _send_pieces(self, channel: Channel, request: host_agent_pb2.ReadRequest) -> None:
        held = self._awaited(channel, request)
        if held is None:
            frames.send_frame(channel, Kind.GONE)
            return
        wanted = {
            index
            for index, piece in enumerate(held.pieces)
            if index % request.streams == request.stream
            and not _bit(request.present, index)
            and (not request.source or piece.source == request.source - 1)
        }
        looked_at, alive = 0, _SignOfLife()
        with self._store.reading(held):
            while wanted:
                with self._store.changed:
                    if len(held.arrived) == looked_at and held.is_current:
                        self._store.changed.wait(WAIT_S)
                    arrived, looked_at = held.arrived[looked_at:], len(held.arrived)
                if not held.is_current:
                    frames.send_frame(channel, Kind.GONE)
                    return
                ready = [index for index in arrived if index in wanted]
                for index in ready:
                    self._send_piece(channel, held, index)
                    wanted.discard(index)
                    alive.sent()
                alive.sign(channel)

    def _send_piece(self, channel: Channel, held: HeldVersion, index: int) -> None:
        piece = held.pieces[index]
        channel.send(frames.HEAD.pack(Kind.PIECE, index, piece.size_bytes))
        for begin, end in piece.ranges:
            with self._lock:  # before they leave, so that what a reader has is counted
                self.sent_bytes += end - begin
            # A segment that is overwritten meanwhile gives bytes that the reader's digest refuses.
            channel.send(held.memory[begin:end])


class _SignOfLife:
    """Frames that say nothing, at most one each `WAIT_S`."""

    def __init__(self) -> None:
        self._sent_s = time.monotonic()

    def sent(self) -> None:
        """Note that something else was sent."""
        self._sent_s = time.monotonic()

    def sign(self, channel: Channel) -> None:
        """Send one, if it is due."""
        if time.monotonic() - self._sent_s >= 0.9 * WAIT_S:
            frames.send_frame(channel, Kind.WAIT)
            self.sent()


def _bit(bits: bytes, index: int) -> bool:
    return index // 8 < len(bits) and bool(bits[index // 8] >> index % 8 & 1)

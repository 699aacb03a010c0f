"""Sends a relay's versions to other hosts: each piece as soon as it is verified here.

The promise: a reader gets something at least every `WAIT_S`, so that it can tell a waiting host from a dead one. A
reader that takes no bytes costs only one thread, until the transport's time-out. Threads: one accepts, one for each
channel. They wait for the condition of the held versions and for their channels.
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
from paceline.weights.hosts.held_versions import HeldVersion, HeldVersions
from paceline.weights.hosts.manifest import version_of
from paceline.weights.hosts.transport import Channel, Listener

WAIT_S = 0.2
MAX_STREAMS = 64
MAX_CHANNELS = 1024
"""Largest number of simultaneous channels; further ones are closed at once."""

seldom = RateLimitedLog(logging.getLogger(__name__))


class Sender:
    """Serves the held versions to relays that prove that they know the secret of the present run."""

    def __init__(self, versions: HeldVersions, listener: Listener) -> None:
        self._versions, self._listener = versions, listener
        self._admitted: tuple[str, bytes] = "", b""
        """The present run and its secret; before the first plan no reader is admitted."""
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        self.sent_bytes = 0
        threading.Thread(target=self._accept, name="weights-accept", daemon=True).start()

    def admit_readers_of(self, run_id: str, secret: bytes) -> None:
        """Admit the readers of this run from now on, and no others."""
        self._admitted = run_id, secret

    def close(self) -> None:
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
            seldom.warning("reader", "the connection to a reader on another host has ended: %s", error)
        finally:
            channel.close()
            with self._lock:
                self._channels.discard(channel)

    def _refusal(self, request: host_agent_pb2.ReadRequest, nonce: bytes) -> str:
        if request.protocol != frames.PROTOCOL:
            return f"this relay speaks protocol {frames.PROTOCOL}, not {request.protocol}"
        run_id, secret = self._admitted
        is_known = bool(secret) and request.run_id == run_id
        if not is_known or not hmac.compare_digest(frames.proof(secret, nonce), request.proof):
            return f"the request has no proof that its sender belongs to run {request.run_id[:80]!r}"
        if not request.manifest and not 0 <= request.stream < request.streams <= MAX_STREAMS:
            return f"stream {request.stream} of {request.streams} is not served; number streams from 0, and use at most {MAX_STREAMS} streams"
        return ""

    def _awaited(self, channel: Channel, request: host_agent_pb2.ReadRequest) -> HeldVersion | None:
        """Return the version once it begins to arrive at this host; None if it will not."""
        version = version_of(request)
        versions, alive = self._versions, _SignOfLife()
        while True:
            with versions.changed:
                held = versions.find(request.run_id, version)
                if held is not None and held.is_current:
                    return held
                if versions.closed or versions.run_id != request.run_id or not versions.will_come(version):
                    return None
                versions.changed.wait(WAIT_S)
            alive.sign(channel)

    def _send_manifest(self, channel: Channel, request: host_agent_pb2.ReadRequest) -> None:
        held, alive = self._awaited(channel, request), _SignOfLife()
        while held is not None and held.is_current:
            with self._versions.changed:
                if not held.manifest_bytes:
                    self._versions.changed.wait(WAIT_S)
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
        unsent = {
            index
            for index, piece in enumerate(held.pieces)
            if index % request.streams == request.stream
            and not _bit(request.present, index)
            and (not request.source or piece.source == request.source - 1)
        }
        num_seen, alive = 0, _SignOfLife()
        with self._versions.reading(held):
            while unsent:
                with self._versions.changed:
                    if len(held.arrived) == num_seen and held.is_current:
                        self._versions.changed.wait(WAIT_S)
                    arrived, num_seen = held.arrived[num_seen:], len(held.arrived)
                if not held.is_current:
                    frames.send_frame(channel, Kind.GONE)
                    return
                ready = [index for index in arrived if index in unsent]
                for index in ready:
                    self._send_piece(channel, held, index)
                    unsent.discard(index)
                    alive.sent()
                alive.sign(channel)

    def _send_piece(self, channel: Channel, held: HeldVersion, index: int) -> None:
        piece = held.pieces[index]
        channel.send(frames.HEAD.pack(Kind.PIECE, index, piece.size_bytes))
        for begin, end in piece.ranges:
            with self._lock:  # counted before they are sent, because the reader may have them at once
                self.sent_bytes += end - begin
            # If the segment is overwritten meanwhile, the reader refuses the bytes because of their digest.
            channel.send(held.memory[begin:end])


class _SignOfLife:
    """Sends empty frames, at most one each `WAIT_S`."""

    def __init__(self) -> None:
        self._sent_s = time.monotonic()

    def sent(self) -> None:
        self._sent_s = time.monotonic()

    def sign(self, channel: Channel) -> None:
        """Send a sign of life if it is due."""
        if time.monotonic() - self._sent_s >= 0.9 * WAIT_S:
            frames.send_frame(channel, Kind.WAIT)
            self.sent()


def _bit(bits: bytes, index: int) -> bool:
    return index // 8 < len(bits) and bool(bits[index // 8] >> index % 8 & 1)

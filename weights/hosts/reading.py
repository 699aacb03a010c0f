"""Brings one version to this host: pieces from other hosts, each verified before it counts.

Several streams share the pieces by their index. Each stream reads from the first upstream that has the version; if that
upstream is silent for `silence_s`, is unreachable, or sends bytes with another digest, the stream continues with the
next upstream at the same piece. So a dead host is skipped within a second, and the hosts after it notice nothing,
because the host that skipped it keeps sending signs of life. Upstreams may change at any time. A stream that only waits
changes to the new upstreams at once, because two hosts that swapped positions would otherwise wait for each other; a
stream that receives bytes continues.

The promise: only bytes with the digest that the control plane vouches for are noted as present, and `run`, called by
one thread, ends with the version, or when a newer version is wanted and this one is gone or stalls, or after `close`.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from paceline.errors import PacelineError, Unavailable, WireError
from paceline.rate_limited_log import RateLimitedLog
from paceline.v1 import host_agent_pb2, worker_pb2
from paceline.weights.format.manifest import MAX_MANIFEST_BYTES
from paceline.weights.hosts import frames
from paceline.weights.hosts.frames import Kind
from paceline.weights.hosts.held_versions import HeldVersion, HeldVersions
from paceline.weights.hosts.manifest import HostManifest, piece_digest, version_of
from paceline.weights.hosts.transport import Channel, Transport

SILENCE_S = 0.7
"""Seconds of silence after which an upstream counts as dead; a live one sends something each `sending.WAIT_S`."""
STREAMS = 4
PAUSE_S = 0.1
"""Seconds of pause after a round in which no upstream had the version."""

AnswerT = TypeVar("AnswerT")
seldom = RateLimitedLog(logging.getLogger(__name__))


class Gone(PacelineError):
    """The upstream no longer has the version."""


class _Redirected(PacelineError):
    """The plan names other upstreams now."""


class Reading:
    """One version that is being brought to this host. `is_overtaken` returns whether a newer one is wanted."""

    def __init__(
        self,
        versions: HeldVersions,
        plan: worker_pb2.HostPlan,
        transport: Transport,
        is_overtaken: Callable[[], bool],
        *,
        streams: int = STREAMS,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.version = version_of(plan)
        self.transfer = worker_pb2.HostTransfer(position=plan.position)
        self._started_s = time.monotonic()
        self._versions, self._plan, self._transport = versions, plan, transport
        self._upstreams: Sequence[worker_pb2.Upstream] = list(plan.upstreams)
        self._is_overtaken = is_overtaken
        self._last_piece_s = time.monotonic()
        self._streams, self._silence_s = streams, silence_s
        self._lock = threading.Lock()
        self._channels: dict[Channel, Sequence[worker_pb2.Upstream]] = {}
        """Open channels, each with the list of upstreams from which the channel's upstream was chosen."""
        self._ended = threading.Event()

    def redirect(self, upstreams: Sequence[worker_pb2.Upstream]) -> None:
        """Read from these upstreams from now on; streams that receive from an earlier one continue with it."""
        with self._lock:
            if list(upstreams) != self._upstreams:
                self._upstreams = list(upstreams)

    def close(self) -> None:
        self._ended.set()
        with self._lock:
            channels = list(self._channels)
        for channel in channels:
            channel.close()

    def run(self) -> HeldVersion | None:
        """Return the version once this host has all of it; None if it stays incomplete: a stream failed, or a newer
        version is wanted and this one has no upstream or no memory. None also after `close`."""
        here = self._versions.find(self._plan.run_id, self.version)
        manifest = here.manifest if here is not None else None
        if here is None or manifest is None:
            data = self._manifest()
            if data is None:
                return None
            manifest = HostManifest.from_bytes(data)
            self._check(manifest)
            here = self._memory(manifest)
            if here is None:
                return None
            self._versions.describe(here, manifest, data)
        with self._versions.writing(here):
            threads = [
                threading.Thread(target=self._read_stream, args=(here, *part), name="weights-read", daemon=True)
                for part in self._parts(here, manifest)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.transfer.seconds = time.monotonic() - self._started_s
        self.transfer.waited_s = min(self.transfer.waited_s, self.transfer.seconds)
        if here.complete and here.is_current:
            return here
        if not here.staged:
            self._versions.drop(here)
        return None

    def _check(self, manifest: HostManifest) -> None:
        if (manifest.run_id, manifest.version) != (self._plan.run_id, self.version) or not manifest.digests:
            raise WireError(
                f"the plan is for version {tuple(self.version)} of run {self._plan.run_id!r}, but its manifest is for "
                f"{tuple(manifest.version)} of {manifest.run_id!r} and has {len(manifest.digests)} digests"
            )

    def _memory(self, manifest: HostManifest) -> HeldVersion | None:
        while not self._ended.is_set():
            held = self._versions.begin(manifest, self.version, staged=False, wait_s=PAUSE_S)
            if held is not None:
                return held
            if self._is_overtaken():
                return None
        return None

    def _parts(self, held: HeldVersion, manifest: HostManifest) -> list[tuple[int, int]]:
        """Return (stream, source) for each stream that misses pieces; source is -1 if one upstream has all pieces."""
        with self._lock:
            several = any(len(upstream.addresses) > 1 for upstream in self._upstreams)
        sources = range(manifest.sources) if several else (-1,)
        missing = {
            (index % self._streams, piece.source if several else -1)
            for index, piece in enumerate(held.pieces)
            if not held.present[index]
        }
        return [
            (stream, source) for stream in range(self._streams) for source in sources if (stream, source) in missing
        ]

    def _manifest(self) -> bytes | None:
        def receive(channel: Channel) -> bytes:
            while True:
                kind, _, length = self._head(channel)
                if kind == Kind.MANIFEST:
                    if length > MAX_MANIFEST_BYTES:
                        raise WireError(f"a manifest has {length} bytes, more than {MAX_MANIFEST_BYTES}")
                    data = frames.receive(channel, length)
                    if hashlib.sha256(data).digest() != self._plan.manifest_sha256:
                        raise WireError("the manifest has another digest than the control plane named")
                    return data

        def request() -> host_agent_pb2.ReadRequest:
            return self._request(manifest=True)

        return self._first_answer(lambda upstream: upstream.addresses[0], request, receive)

    def _read_stream(self, held: HeldVersion, stream: int, source: int) -> None:
        def address(upstream: worker_pb2.Upstream) -> str:
            return upstream.addresses[source if len(upstream.addresses) > 1 else 0]

        mine = [
            index
            for index, piece in enumerate(held.pieces)
            if index % self._streams == stream and (source < 0 or piece.source == source)
        ]

        def receive(channel: Channel) -> bool:
            while any(not held.present[index] for index in mine):
                kind, index, length = self._head(channel)
                if kind == Kind.PIECE:
                    if index not in range(len(held.pieces)) or length != held.pieces[index].size_bytes:
                        raise WireError(
                            f"piece {index} with {length} bytes is not one of the version's {len(held.pieces)} pieces"
                        )
                    self._receive_piece(channel, held, index)
            return True

        def request() -> host_agent_pb2.ReadRequest:
            present = _bits(held.present)
            return self._request(stream=stream, streams=self._streams, present=present, source=source + 1)

        try:
            self._first_answer(address, request, receive)
        except Exception as error:  # the version stays incomplete, and the next plan tries again
            seldom.warning("stream", "a stream of weights ended: %s", error, error=error)

    def _receive_piece(self, channel: Channel, held: HeldVersion, index: int) -> None:
        piece, manifest = held.pieces[index], held.manifest
        assert manifest is not None
        for begin, end in piece.ranges:
            channel.receive_into(held.memory[begin:end])
        if piece_digest(held.memory, piece, manifest.algorithm) != manifest.digests[index]:
            raise WireError(f"piece {index} of version {self.version.step} has another digest than the learner's")
        with self._lock:
            self.transfer.received_bytes += piece.size_bytes
            self._last_piece_s = time.monotonic()
        self._versions.add(held, index, manifest.digests[index])

    def _head(self, channel: Channel) -> tuple[Kind, int, int]:
        """Return the next frame's head, without signs of life. Raises Gone, _Redirected."""
        started_s = time.monotonic()
        while True:
            kind, index, length = frames.receive_head(channel)
            if kind == Kind.GONE:
                raise Gone("the host no longer has the version")
            if kind == Kind.REFUSED:
                raise Unavailable(frames.receive(channel, min(length, 1000)).decode(errors="replace"))
            if kind != Kind.WAIT:
                break
            with self._lock:
                waited_s = time.monotonic() - started_s
                self.transfer.waited_s += waited_s / self._streams
            started_s = time.monotonic()
            self._check_wait(channel)
        return kind, index, length

    def _check_wait(self, channel: Channel) -> None:
        """Raise an error if waiting for this upstream and version has no purpose any more."""
        with self._lock:
            if self._channels.get(channel) is not self._upstreams:
                raise _Redirected("the plan names other upstreams")
            idle_s = time.monotonic() - self._last_piece_s
        if idle_s > self._plan.max_wait_s and self._is_overtaken():
            raise Gone("the transfer has stalled, and a newer version is wanted")

    def _request(self, **fields: Any) -> host_agent_pb2.ReadRequest:
        return host_agent_pb2.ReadRequest(
            protocol=frames.PROTOCOL, run_id=self._plan.run_id, version=self._plan.version, **fields
        )

    def _first_answer(
        self,
        address_of: Callable[[worker_pb2.Upstream], str],
        request: Callable[[], host_agent_pb2.ReadRequest],
        receive: Callable[[Channel], AnswerT],
    ) -> AnswerT | None:
        """Send the request to the upstreams in turn until one has answered in full. Return None after `close`, or after
        a round without an answer if a newer version is wanted."""
        index = 0
        while not self._ended.is_set():
            with self._lock:
                upstreams = self._upstreams
            if index >= len(upstreams):
                # A whole round of upstreams has failed.
                index = 0
                if self._is_overtaken():
                    return None
                self._ended.wait(PAUSE_S)
                continue
            address = address_of(upstreams[index])
            self.transfer.upstream = address
            try:
                return self._ask(address, upstreams, request(), receive)
            except _Redirected:
                index = 0
                continue
            except Gone:
                pass
            except (Unavailable, WireError) as error:
                if not self._ended.is_set():
                    with self._lock:
                        self.transfer.skipped += 1
                    seldom.warning(address, "weights are not read from %s but from another host: %s", address, error)
            index += 1
        return None

    def _ask(
        self,
        address: str,
        upstreams: Sequence[worker_pb2.Upstream],
        request: host_agent_pb2.ReadRequest,
        receive: Callable[[Channel], AnswerT],
    ) -> AnswerT:
        channel = self._transport.connect(address, self._silence_s)
        with self._lock:
            self._channels[channel] = upstreams
        try:
            request.proof = frames.proof(self._plan.token, frames.receive(channel, frames.NONCE_BYTES))
            frames.send_request(channel, request)
            return receive(channel)
        finally:
            with self._lock:
                self._channels.pop(channel, None)
            channel.close()


def _bits(present: bytearray) -> bytes:
    """Return one bit for each piece, the lowest first."""
    bits = bytearray(-(-len(present) // 8))
    for index, is_present in enumerate(present):
        if is_present:
            bits[index // 8] |= 1 << index % 8
    return bytes(bits)

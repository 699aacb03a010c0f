"""Loads weights into the engine of one worker when this host's relay has brought them.

Promise: a version is loaded only after the relay has verified all of it against the manifest that the control plane
vouches for, and its memory cannot be overwritten while it is loaded. The newest complete version is loaded, whatever
was planned before; versions only grow. While the engine loads a version, the relay continues to receive the next one.
Two threads: the client's, which brings messages, and the loader, which waits for them and for the engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import PacelineError, Unavailable, WireError, first_line
from paceline.groups import Version
from paceline.rate_limited_log import unforeseen
from paceline.tracing import span, version_traceparent
from paceline.v1 import host_agent_pb2, worker_pb2
from paceline.weights.hosts.client import RelayClient, close_fd
from paceline.weights.hosts.host_weights import HostWeights
from paceline.weights.hosts.manifest import HostManifest, version_of
from paceline.weights.hosts.segment import HostSegment
from paceline.weights.progress import WeightProgress

PLANS_KEPT = 64
RETRIES = 3
"""Number of attempts to load a version that was overwritten before it could be read."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Complete:
    version: Version
    segment: HostSegment
    generation: int
    manifest: HostManifest
    transfer: worker_pb2.HostTransfer


class HostReceiver:
    """Receives the weights of one worker. `on_weights(version, weights)` returns when the engine samples with a copy of
    the weights. The checksums of `weights` were compared before, but its numbers were not checked. An exception refuses
    the version. `on_ack(version, ok, message, transfer)` sends the answer. Both are called from the loader's thread.
    `on_relay` is called from the client's thread when the host gets another relay."""

    def __init__(
        self,
        *,
        run_id: str,
        client: RelayClient,
        on_weights: Callable[[Version, HostWeights], None],
        on_ack: Callable[[Version, bool, str, worker_pb2.HostTransfer | None], None],
        on_relay: Callable[[], None],
    ) -> None:
        self._run_id, self._client = run_id, client
        self._on_weights, self._on_ack, self._on_relay = on_weights, on_ack, on_relay
        self._changed = threading.Condition()
        self._plan: worker_pb2.HostPlan | None = None
        self._digests: dict[Version, bytes] = {}
        """Maps planned versions to the SHA-256 of their manifests."""
        self._complete: _Complete | None = None
        self._segments: dict[int, HostSegment] = {}
        self._held: Version | None = None
        self._refused: Version | None = None
        self._loading: Version | None = None
        self._size_bytes = 0
        self._arriving: WeightProgress | None = None
        """Progress of the arriving version, which may be older than the planned one."""
        self._must_answer = False
        self._closed = False
        client.on_connected, client.on_reply = self._connected, self._reply
        threading.Thread(target=self._load_forever, name="weights-load", daemon=True).start()

    @property
    def held(self) -> Version | None:
        """The last version that the engine got from this receiver."""
        return self._held

    @property
    def at_work(self) -> list[WeightProgress]:
        """Progress of the version that is being loaded, else of the version that arrives; empty if there is neither."""
        with self._changed:
            if self._loading is not None:
                return [WeightProgress(self._loading, "loading", self._size_bytes)]
            if self._plan is None or self._is_old(version_of(self._plan)):
                return []
            if self._arriving is not None and not self._is_old(self._arriving.version):
                return [self._arriving]
            return [WeightProgress(version_of(self._plan), "receiving", 0)]

    def take_plan(self, plan: worker_pb2.HostPlan, serving: Version | None) -> None:
        """Use the coordinator's plan; `serving` is the engine's version. Returns at once."""
        version = version_of(plan)
        with self._changed:
            if plan.run_id != self._run_id or self._closed:
                return
            if serving is not None and (self._held is None or serving > self._held):
                self._held = serving  # the version came by another channel
            self._digests[version] = plan.manifest_sha256
            while len(self._digests) > PLANS_KEPT:
                del self._digests[next(iter(self._digests))]
            if self._plan is None or version >= version_of(self._plan):
                self._plan = plan
            self._must_answer = self._must_answer or version == self._held
            self._refused = None if self._refused == version else self._refused
            self._changed.notify_all()
        self._send(plan)

    def close(self) -> None:
        """Take no more versions, without waiting."""
        self._client.forget()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _send(self, plan: worker_pb2.HostPlan) -> None:
        with contextlib.suppress(Unavailable):  # a relay that is being started gets the plan when it connects
            self._client.send(host_agent_pb2.AgentRequest(plan=plan))

    def _connected(self) -> None:
        with self._changed:
            self._complete, plan = None, self._plan
            self._segments.clear()
        self._on_relay()
        if plan is not None:
            self._send(plan)

    def _reply(self, reply: host_agent_pb2.AgentReply, fd: int | None) -> None:
        if reply.WhichOneof("reply") != "held" or reply.held.run_id != self._run_id:
            close_fd(reply, fd)
            return
        held = reply.held
        version = version_of(held)
        if not held.complete or fd is None:
            close_fd(reply, fd)
            with self._changed:
                if version in self._digests:
                    self._arriving = WeightProgress(version, "receiving", held.verified_bytes)
            return
        try:
            with self._changed:
                segment = self._segments.get(held.inode)
            segment = segment or HostSegment.attach(fd)
        finally:
            os.close(fd)
        manifest = HostManifest.from_bytes(held.manifest)
        with self._changed:
            expected = self._digests.get(version)
            if expected is None or hashlib.sha256(held.manifest).digest() != expected:
                return  # not planned here yet: the relay sends this message again when it gets the plan
            self._segments[held.inode] = segment
            while len(self._segments) > RETRIES:
                del self._segments[next(iter(self._segments))]
            if self._complete is None or version >= self._complete.version:
                self._complete = _Complete(version, segment, held.generation, manifest, held.transfer)
            self._changed.notify_all()

    def _load_forever(self) -> None:
        while True:
            with self._changed:
                # No deadline: the next version comes when the learner's step ends. `close` ends it.
                self._changed.wait_for(lambda: self._closed or self._must_answer or self._next() is not None)
                if self._closed:
                    return
                again, self._must_answer = self._must_answer and self._held is not None, False
                held, complete = self._held, self._next()
                self._loading = complete.version if complete is not None else None
                self._size_bytes = complete.manifest.size_bytes if complete is not None else 0
            if again and held is not None:
                self._answer(held, True, "already held", None)
            if complete is not None:
                self._load(complete)

    def _next(self) -> _Complete | None:
        complete = self._complete
        return None if complete is None or self._is_old(complete.version) else complete

    def _is_old(self, version: Version) -> bool:
        return version == self._refused or (self._held is not None and version <= self._held)

    def _load(self, complete: _Complete) -> None:
        version = complete.version
        trace = version_traceparent(self._run_id, version.step)
        message = ""
        try:
            # The relay has compared all bytes with the learner's; the engine checks the numbers.
            weights = HostWeights(complete.segment, complete.generation, complete.manifest.layout, "compared")
            with weights.reading(), span("weights.swap", trace, bytes=complete.manifest.size_bytes):
                self._on_weights(version, weights)
        except Unavailable as error:
            if complete.segment.generation != complete.generation:
                log.info("version %d was overwritten by a newer one before it was loaded", version.step)
                self._end_loading(None, version)
                return
            message = first_line(error)
        except Exception as error:  # the engine's errors too: their text is the reason of the refusal
            if not isinstance(error, PacelineError):
                unforeseen.note("loading weights", error)
            message = first_line(error)
        self._end_loading(None if message else version, version)
        self._answer(version, not message, message, complete.transfer)

    def _end_loading(self, held: Version | None, refused: Version) -> None:
        with self._changed:
            self._loading = None
            if held is not None:
                self._held = held
            else:
                self._refused = refused

    def _answer(self, version: Version, ok: bool, message: str, transfer: worker_pb2.HostTransfer | None) -> None:
        try:
            self._on_ack(version, ok, message, transfer)
        except Exception as error:  # raised by the listener; this thread has to load further versions
            unforeseen.note("acknowledging weights", error)


def check_plan(plan: worker_pb2.HostPlan) -> None:
    """Raise WireError for a plan that no coordinator makes."""
    if len(plan.manifest_sha256) != hashlib.sha256().digest_size or not plan.upstreams:
        raise WireError(
            f"the plan for version {plan.version.step} has {len(plan.upstreams)} upstreams and a digest of "
            f"{len(plan.manifest_sha256)} bytes; it needs at least one upstream and a SHA-256"
        )

"""The relay of a host: it owns the host's segments, brings versions into them, and passes the versions on.

Workers of the host tell it the coordinator's plans; learner ranks of the host stage their versions in its memory. The
promise: a version reaches a host once, however many workers it has; versions that a newer plan replaced before they
began to arrive are skipped, and a version that has begun is completed if possible; a client's faults end only that
client's connection.

Threads: one plans and reads (`_read_forever`), one informs clients (`_tell_forever`), one accepts connections, and one
serves each client; `Sender` and `Reading` have further threads. The condition of the held versions guards the state; no
thread holds it while it sends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from paceline.errors import PacelineError, Unavailable, WireError
from paceline.groups import Version
from paceline.rate_limited_log import RateLimitedLog, unforeseen
from paceline.v1 import host_agent_pb2, worker_pb2
from paceline.weights.hosts.held_versions import HeldVersion, HeldVersions
from paceline.weights.hosts.local_socket import LocalConnection
from paceline.weights.hosts.manifest import HostManifest, piece_digest, version_message, version_of
from paceline.weights.hosts.reading import SILENCE_S, STREAMS, Reading
from paceline.weights.hosts.sending import Sender
from paceline.weights.hosts.transport import Transport, next_connection

PROTOCOL = 1
PROGRESS_S = 0.5
"""Seconds between two messages about a version that is arriving."""
SEND_TIMEOUT_S = 5.0
"""A reader on another host is dropped if it takes no bytes for this many seconds."""
MAX_HASH_THREADS = 8

seldom = RateLimitedLog(logging.getLogger(__name__))


class Relay:
    """Listens to other hosts at `host`, and serves this host's clients, each from a call of `serve`."""

    def __init__(
        self, transport: Transport, host: str, port: int = 0, *, streams: int = STREAMS, silence_s: float = SILENCE_S
    ) -> None:
        self.agent_id = secrets.token_hex(8)
        self.versions = HeldVersions()
        listener = transport.listen(host, port, SEND_TIMEOUT_S)
        self.port = listener.port
        self.sender = Sender(self.versions, listener)
        self._transport, self._streams, self._silence_s = transport, streams, silence_s
        self._lock = threading.Lock()
        self._clients: set[_Client] = set()
        self.last_client_s = time.monotonic()
        self.had_client = False
        self._plan: worker_pb2.HostPlan | None = None
        self._reading: Reading | None = None
        self._transfers: dict[Version, worker_pb2.HostTransfer] = {}
        self._news = threading.Event()
        self._closed = False
        cores = len(os.sched_getaffinity(0))
        self._hashing = ThreadPoolExecutor(min(cores, MAX_HASH_THREADS), "weights-hash")
        for run in (self._read_forever, self._tell_forever):
            threading.Thread(target=run, name=f"weights{run.__name__}", daemon=True).start()

    @property
    def num_clients(self) -> int:
        with self._lock:
            return len(self._clients)

    def serve_forever(self, listener: socket.socket) -> None:
        while (taken := next_connection(listener, lambda: listener.fileno() < 0)) is not None:
            try:
                self.serve(LocalConnection(taken[0]))
            except Unavailable as error:
                seldom.warning("client", "%s", error)

    def serve(self, connection: LocalConnection) -> None:
        client = _Client(self, connection)
        with self._lock:
            self._clients.add(client)
            self.had_client = True
        threading.Thread(target=client.run, name="weights-client", daemon=True).start()

    def close(self) -> None:
        """End all threads, without waiting for them."""
        self._closed = True
        with self.versions.changed:
            reading = self._reading
        if reading is not None:
            reading.close()
        self.versions.close()
        self.sender.close()
        self._news.set()
        self._hashing.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            client.connection.close()

    def take_plan(self, plan: worker_pb2.HostPlan) -> None:
        """Accept a plan to bring a version here. Only the newest plan counts; a later one may name other upstreams."""
        version = version_of(plan)
        with self.versions.changed:
            newer = self._plan is None or self._plan.run_id != plan.run_id or version >= version_of(self._plan)
            if newer:
                if plan.run_id != self.versions.run_id and self._reading is not None:
                    self._reading.close()
                self.sender.admit_readers_of(plan.run_id, plan.token)
                self.versions.use_run(plan.run_id)
                self._plan, self.versions.wanted = plan, version
                if self._reading is not None and self._reading.version == version:
                    self._reading.redirect(plan.upstreams)
            self.versions.changed.notify_all()
        self._news.set()

    def take_layout(self, layout: host_agent_pb2.StageLayout) -> HostManifest:
        """Prepare to stage versions of a run. Raises WireError."""
        manifest = HostManifest.from_bytes(layout.manifest)
        if manifest.run_id != layout.run_id or layout.source >= max(1, manifest.sources):
            raise WireError(
                f"the layout is of run {manifest.run_id!r} with {manifest.sources} hosts, but was sent for host "
                f"{layout.source} of run {layout.run_id!r}"
            )
        with self.versions.changed:
            self.sender.admit_readers_of(layout.run_id, layout.token)
            self.versions.use_run(layout.run_id)
        return manifest

    def hash_staged(self, held: HeldVersion, layout: HostManifest, source: int) -> list[bytes]:
        """Return the digests of this host's pieces of a version, and note the pieces as present."""

        def digest(index: int) -> bytes:
            made = piece_digest(held.memory, held.pieces[index], layout.algorithm)
            self.versions.add(held, index, made)
            return made

        mine = [index for index, piece in enumerate(held.pieces) if piece.source == source]
        return list(self._hashing.map(digest, mine))

    def described(self, held: HeldVersion, data: bytes) -> None:
        """Accept the manifest of a staged version. Raises WireError."""
        manifest = HostManifest.from_bytes(data)
        if (manifest.run_id, manifest.version) != (held.run_id, held.version) or not manifest.digests:
            raise WireError(f"the manifest is not of version {tuple(held.version)} of run {held.run_id!r}")
        self.versions.describe(held, manifest, data)
        self._news.set()

    def staged(self, held: HeldVersion, reply: host_agent_pb2.AgentReply) -> None:
        """Tell all ranks of this host that a version is staged."""
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            with contextlib.suppress(Unavailable):  # its thread notices
                client.tell_staged(held, reply)

    def left(self, client: _Client) -> None:
        with self._lock:
            self._clients.discard(client)
            self.last_client_s = time.monotonic()

    def _read_forever(self) -> None:
        while (plan := self._next_plan()) is not None:
            reading = Reading(
                self.versions,
                plan,
                self._transport,
                partial(self._is_overtaken, plan),
                streams=self._streams,
                silence_s=self._silence_s,
            )
            with self.versions.changed:
                self._reading = reading
            held = None
            try:
                held = reading.run()
            except PacelineError as error:
                seldom.warning("plan", "version %d did not arrive: %s", plan.version.step, error)
            except Exception as error:  # the relay goes on with the next plan
                unforeseen.note("reading weights from other hosts", error)
            with self.versions.changed:
                self._reading = None
                if held is not None:
                    self._transfers = {held.version: reading.transfer}
                else:
                    self.versions.changed.wait(PROGRESS_S)
            self._news.set()

    def _next_plan(self) -> worker_pb2.HostPlan | None:
        """Wait for the plan of a version that this host lacks; return the plan, or None after `close`."""
        with self.versions.changed:
            while not self._closed:
                plan = self._plan
                if plan is not None and plan.run_id == self.versions.run_id:
                    held = self.versions.find(plan.run_id, version_of(plan))
                    newest = self.versions.newest_complete()
                    have_newer = newest is not None and newest.version >= version_of(plan)
                    # A version that all ranks of this host stage needs nothing from other hosts.
                    staging = held is not None and held.staged and held.layout.sources == 1
                    if not have_newer and not staging:
                        return plan
                # No deadline: the next plan comes when the next version does.
                self.versions.changed.wait()
            return None

    def _is_overtaken(self, plan: worker_pb2.HostPlan) -> bool:
        newest = self._plan
        return newest is not plan and newest is not None and version_of(newest) != version_of(plan)

    def _tell_forever(self) -> None:
        while not self._closed:
            self._news.wait(PROGRESS_S)
            self._news.clear()
            with self._lock:
                followers = [client for client in self._clients if client.run_id]
            with self.versions.changed:
                newest, reading = self.versions.newest_complete(), self._reading
                arriving = None
                if reading is not None:
                    arriving = self.versions.find(self.versions.run_id, reading.version)
            for client in followers:
                try:
                    if newest is not None and client.run_id == newest.run_id:
                        client.tell_complete(newest)
                    if reading is not None and client.run_id == self.versions.run_id:
                        client.tell_progress(reading.version, arriving)
                except Unavailable:
                    pass  # its thread notices

    def transfer_of(self, version: Version) -> worker_pb2.HostTransfer:
        transfer = worker_pb2.HostTransfer(agent_id=self.agent_id, sent_bytes=self.sender.sent_bytes)
        with self.versions.changed:
            if version in self._transfers:
                transfer.MergeFrom(self._transfers[version])
            elif self._plan is not None:
                transfer.position = self._plan.position
        return transfer


class _Client:
    """A worker or a learner rank of this host."""

    def __init__(self, relay: Relay, connection: LocalConnection) -> None:
        self.connection = connection
        self._relay = relay
        self.run_id = ""
        self._reported: tuple[Version, int] | None = None
        self._layout: HostManifest | None = None
        self._source, self._local_ranks = 0, 1
        self._staging: HeldVersion | None = None

    def run(self) -> None:
        try:
            # No deadline: a client requests signs of life, and a dead client's connection ends.
            while (received := self.connection.receive(host_agent_pb2.AgentRequest, None)) is not None:
                request, fd = received
                if fd is not None:
                    os.close(fd)
                try:
                    self._take(request)
                except WireError as error:
                    refusal = host_agent_pb2.AgentRefusal(message=str(error))
                    self.connection.send(host_agent_pb2.AgentReply(refusal=refusal))
        except Unavailable:
            pass
        except Exception as error:  # a fault of this client alone
            unforeseen.note("a client of the host's relay", error)
        finally:
            self._end_staging(complete=False)
            self.connection.close()
            self._relay.left(self)

    def tell_complete(self, held: HeldVersion) -> None:
        if self._reported == (held.version, held.generation):
            return
        message = self._held(held.version, held.verified_bytes)
        message.complete, message.generation, message.manifest = True, held.generation, held.manifest_bytes
        message.inode = held.segment.identity[1]
        message.transfer.CopyFrom(self._relay.transfer_of(held.version))
        # Noted first, because a plan that comes during the sending needs an answer too.
        self._reported = held.version, held.generation
        self.connection.send(host_agent_pb2.AgentReply(held=message), held.segment.fd)

    def tell_progress(self, version: Version, held: HeldVersion | None) -> None:
        verified_bytes = held.verified_bytes if held is not None else 0
        self.connection.send(host_agent_pb2.AgentReply(held=self._held(version, verified_bytes)))

    def _take(self, request: host_agent_pb2.AgentRequest) -> None:
        match request.WhichOneof("request"):
            case "client":
                identity = host_agent_pb2.AgentIdentity(
                    protocol=PROTOCOL, agent_id=self._relay.agent_id, port=self._relay.port
                )
                self.connection.send(host_agent_pb2.AgentReply(identity=identity))
            case "alive":
                self.connection.send(host_agent_pb2.AgentReply(alive=request.alive))
            case "plan":
                # A version may be complete before its plan comes, and a client that sets up its run again has seen no
                # version.
                self.run_id, self._reported = request.plan.run_id, None
                self._relay.take_plan(request.plan)
            case "layout":
                self._layout = self._relay.take_layout(request.layout)
                self._source, self._local_ranks = request.layout.source, max(1, request.layout.local_ranks)
            case "begin":
                self._begin(version_of(request.begin))
            case "end":
                self._end(version_of(request.end))
            case "manifest":
                manifest = request.manifest
                held = self._relay.versions.find(manifest.run_id, version_of(manifest))
                if held is not None:
                    self._relay.described(held, manifest.manifest)
            case _:
                raise WireError("this relay does not know the request; it may be older than its client")

    def _begin(self, version: Version) -> None:
        if self._layout is None:
            raise WireError("a version was to be staged, but its layout has not arrived")
        self._end_staging(complete=False)
        held = self._relay.versions.begin(self._layout, version, staged=True, wait_s=0.0)
        if held is None:
            refusal = host_agent_pb2.AgentRefusal(
                message=f"this host's relay has no memory for version {version.step}", version=version_message(version)
            )
            self.connection.send(host_agent_pb2.AgentReply(refusal=refusal))
            return
        with self._relay.versions.changed:
            held.writers += 1
        self._staging = held
        buffer = host_agent_pb2.StageBuffer(
            version=version_message(version), generation=held.generation, inode=held.segment.identity[1]
        )
        self.connection.send(host_agent_pb2.AgentReply(buffer=buffer), held.segment.fd)

    def _end(self, version: Version) -> None:
        held, layout = self._staging, self._layout
        if held is None or layout is None or held.version != version:
            raise WireError(f"version {tuple(version)} was ended, but staging it had not begun")
        held.ranks_done.add(id(self))
        if len(held.ranks_done) < self._local_ranks:
            return  # this rank stays a writer until the last rank has finished
        with self._relay.versions.writing(held):
            digests = self._relay.hash_staged(held, layout, self._source)
        staged = host_agent_pb2.Staged(version=version_message(version), digests=digests)
        self._relay.staged(held, host_agent_pb2.AgentReply(staged=staged))

    def tell_staged(self, held: HeldVersion, reply: host_agent_pb2.AgentReply) -> None:
        """Send the digests of a version that all ranks of this host have staged."""
        if self._staging is held:
            self._end_staging(complete=True)
            self.connection.send(reply)

    def _end_staging(self, *, complete: bool) -> None:
        held, self._staging = self._staging, None
        if held is None:
            return
        with self._relay.versions.changed:
            held.writers -= 1
        if not complete and not held.complete:
            self._relay.versions.drop(held)

    def _held(self, version: Version, verified_bytes: int) -> host_agent_pb2.HeldVersion:
        return host_agent_pb2.HeldVersion(
            run_id=self.run_id, version=version_message(version), verified_bytes=verified_bytes
        )

"""Stages one rank's versions in the memory of its host, through the host's relay.

`publish` blocks only while it requests memory from the relay and while it copies: digests are made by the relay. On a
GPU it blocks only for the request; the copies end before the next optimizer step, which waits for their event.

The promise: a relay that dies is replaced, and gets the newest version again from the memory that this rank still maps.
`on_staged(version, digests)` is called when all ranks of this host have staged a version, from the client's thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

import torch

from paceline.errors import PacelineError, Unavailable
from paceline.groups import Version
from paceline.rate_limited_log import unforeseen
from paceline.v1 import host_agent_pb2
from paceline.weights.hosts.client import RelayClient, close_fd
from paceline.weights.hosts.manifest import HostManifest, version_message, version_of
from paceline.weights.hosts.segment import HostSegment

MEMORY_S = 30.0
"""Longest wait in seconds for memory of the host while its relay is being replaced; normally the wait is
milliseconds."""
KEPT_SEGMENTS = 4

log = logging.getLogger(__name__)


class RankStage:
    """Stages the versions of one rank of one run through the relay of its host."""

    def __init__(
        self,
        client: RelayClient,
        layout: HostManifest,
        *,
        source: int,
        local_ranks: int,
        token: bytes,
        on_staged: Callable[[Version, list[bytes]], None],
        on_held: Callable[[host_agent_pb2.HeldVersion, HostSegment], None],
        on_replaced: Callable[[], None],
    ) -> None:
        """`on_held` is called for complete versions of runs that this client follows; `on_replaced` when there is another
        relay, before the newest version is staged again."""
        self._client, self._layout = client, layout
        self._on_staged, self._on_held, self._on_replaced = on_staged, on_held, on_replaced
        self._message = host_agent_pb2.StageLayout(
            run_id=layout.run_id, manifest=layout.to_bytes(), source=source, local_ranks=local_ranks, token=token
        )
        self._changed = threading.Condition()
        self._segments: dict[int, HostSegment] = {}
        """Maps the inode of a segment to the mapped segment."""
        self._buffer: tuple[Version, HostSegment] | None = None
        self._lives = 0
        """Number of relays to which this rank has sent the layout, one after the other."""
        self._begun_with = -1
        """Number of the relay that gave the memory of the newest version."""
        self._newest: tuple[Version, HostSegment] | None = None
        self._staging = threading.Lock()
        self._event: torch.cuda.Event | None = None
        self._ending: threading.Thread | None = None
        self._closed = False
        client.on_connected, client.on_reply = self._connected, self._reply
        self._introduce()

    def publish(self, version: Version, write: Callable[[HostSegment], torch.cuda.Event | None]) -> float:
        """Stage a version; `write` fills the memory. Return the seconds for which the caller was blocked. Raises
        Unavailable if this host cannot have a relay."""
        started_s = time.perf_counter()
        if self._ending is not None:
            self._ending.join()
        with self._staging:
            segment = self._memory(version)
            event = write(segment)
            self._event, self._newest = event, (version, segment)
            if event is None:
                self._end(version)
            else:
                self._ending = threading.Thread(
                    target=self._end_after, args=(version, event), name="weights-staged", daemon=True
                )
                self._ending.start()
        return time.perf_counter() - started_s

    def wait_for_copies(self) -> None:
        """Make the current stream wait for the copies of the newest version. Call it before weights change."""
        event, self._event = self._event, None
        if event is not None:
            event.wait()

    def send(self, request: host_agent_pb2.AgentRequest) -> bool:
        try:
            self._client.send(request)
        except Unavailable:
            return False
        return True

    def close(self) -> None:
        """Leave the run; the client stays connected."""
        self._closed = True
        self._client.forget()
        with self._changed:
            self._changed.notify_all()

    def _memory(self, version: Version) -> HostSegment:
        deadline_s = time.monotonic() + MEMORY_S
        with self._changed:
            self._buffer = None
            requested_life = -1
            while self._buffer is None or self._buffer[0] != version:
                if requested_life != self._lives:
                    begin = host_agent_pb2.StageBegin(run_id=self._layout.run_id, version=version_message(version))
                    if self.send(host_agent_pb2.AgentRequest(begin=begin)):
                        requested_life = self._lives
                if self._closed or time.monotonic() > deadline_s:
                    raise Unavailable(
                        f"this host's relay gave no memory for version {version.step} within {MEMORY_S:.0f} s; its log says "
                        "why (weights.channel: delta needs no relays)"
                    )
                self._changed.wait(0.1)
            self._begun_with = requested_life
            return self._buffer[1]

    def _end_after(self, version: Version, event: torch.cuda.Event) -> None:
        event.synchronize()
        self._end(version)

    def _end(self, version: Version) -> None:
        end = host_agent_pb2.StageEnd(run_id=self._layout.run_id, version=version_message(version))
        self.send(host_agent_pb2.AgentRequest(end=end))  # else the next relay gets the version again

    def _introduce(self) -> None:
        self.send(host_agent_pb2.AgentRequest(layout=self._message))

    def _connected(self) -> None:
        """Stage with a new relay from now on. Called on the client's thread."""
        self._introduce()  # before any thread may ask for memory
        with self._changed:
            self._lives += 1
            self._segments.clear()
            self._changed.notify_all()
        self._on_replaced()
        threading.Thread(target=self._stage_again, name="weights-again", daemon=True).start()

    def _stage_again(self) -> None:
        with self._staging:
            if self._newest is None or self._begun_with == self._lives:
                return  # it was staged with this relay meanwhile; beginning it again would drop other ranks' parts
            version, earlier = self._newest
            try:
                segment = self._memory(version)
                segment.flat().copy_(earlier.flat())
                self._newest = version, segment
                self._end(version)
            except PacelineError as error:
                log.warning("version %d is not staged again: %s", version.step, error)

    def _reply(self, reply: host_agent_pb2.AgentReply, fd: int | None) -> None:
        match reply.WhichOneof("reply"):
            case "buffer":
                segment = self._segment(reply.buffer.inode, fd)
                with self._changed:
                    self._buffer = version_of(reply.buffer), segment
                    self._changed.notify_all()
            case "staged":
                version = version_of(reply.staged)
                try:
                    self._on_staged(version, list(reply.staged.digests))
                except Exception as error:  # raised for this run; the connection has to go on
                    unforeseen.note("a staged version", error)
            case "held" if reply.held.complete and fd is not None:
                self._on_held(reply.held, self._segment(reply.held.inode, fd))
            case "refusal":
                log.warning("this host's relay: %s", reply.refusal.message)
                close_fd(reply, fd)
            case _:
                close_fd(reply, fd)

    def _segment(self, inode: int, fd: int | None) -> HostSegment:
        if fd is None:
            raise Unavailable("the relay named memory but sent no descriptor of it")
        try:
            if inode not in self._segments:
                self._segments[inode] = HostSegment.attach(fd)
                while len(self._segments) > KEPT_SEGMENTS:
                    del self._segments[next(iter(self._segments))]
            return self._segments[inode]
        finally:
            os.close(fd)

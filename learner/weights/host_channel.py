"""The channel by hosts: every rank stages its shards in its host's memory, and relays bring them to all other hosts.

Rank 0 adds the manifest, with the digests from the relays of all the learner's hosts, and informs the coordinator,
which tells each host where to read. Members without a relay, and members that relays failed to reach several times,
read the run's object store, which rank 0 writes only for them. Rank 0 has two threads: one completes manifests
(`_complete_forever`), one puts versions into the object store (`_store_forever`). Only `close` waits for them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.errors import InvalidInput, PacelineError, Unavailable
from paceline.groups import Version
from paceline.learner.weights.channel import WeightChannel
from paceline.learner.weights.shard_writer import ShardWriter
from paceline.rate_limited_log import unforeseen
from paceline.v1 import host_agent_pb2, worker_pb2
from paceline.weights.format.packing import empty_flat, views
from paceline.weights.hosts.client import RelayClient
from paceline.weights.hosts.manifest import HostManifest, PieceAlgorithm, version_message, version_of
from paceline.weights.hosts.members import HostMembers
from paceline.weights.hosts.segment import HostSegment
from paceline.weights.hosts.stage import RankStage
from paceline.weights.store.offers import StoreOffers
from paceline.weights.store.rank_board import RankBoard
from paceline.weights.store.version_source import whole_slices
from paceline.weights.store.writer import StoreWriter

STORE_RETRY_S = 0.5
CLOSE_WAIT_S = 2.0
"""Longest wait in seconds for threads that end; a thread that copies a large version may outlive it."""
NO_RELAY = b"0" * 16
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Hosts:
    """The learner's hosts, the same on all ranks."""

    host_of_rank: tuple[int, ...]
    rank: int
    token: bytes

    @property
    def source(self) -> int:
        return self.host_of_rank[self.rank]

    @property
    def is_leader(self) -> bool:
        """Return whether this is the first rank of its host, which acts for the host."""
        return self.host_of_rank.index(self.source) == self.rank

    @property
    def num_hosts(self) -> int:
        return max(self.host_of_rank) + 1


class HostChannel(WeightChannel):
    """A `WeightChannel` for all ranks except rank 0. `board` collects the hosts' digests."""

    def __init__(self, client: RelayClient, hosts: Hosts, board: RankBoard, writer: ShardWriter) -> None:
        self._client, self._hosts, self._board, self._writer = client, hosts, board, writer
        self._closed = threading.Event()
        self._stage = RankStage(
            client,
            writer.manifest,
            source=hosts.source,
            local_ranks=hosts.host_of_rank.count(hosts.source),
            token=hosts.token,
            on_staged=self._on_staged,
            on_held=self._on_held,
            on_replaced=self._on_replaced,
        )
        # Copies in progress on a GPU have to end before the weights change, but no sooner.
        self._hook = register_optimizer_step_pre_hook(lambda *_: self._stage.wait_for_copies())

    def publish(self, version: Version, model: nn.Module) -> None:
        self._publish(version, model)

    def close(self) -> None:
        self._closed.set()
        self._hook.remove()
        self._stage.close()

    def _publish(self, version: Version, model: nn.Module) -> float:
        return self._stage.publish(version, lambda segment: self._writer.write(model, segment))

    def _on_staged(self, version: Version, digests: list[bytes]) -> None:
        if self._hosts.is_leader:
            note = {"address": self._address, "digests": [digest.hex() for digest in digests]}
            self._board.put(_key(version, self._hosts.source), json.dumps(note).encode())

    def _on_held(self, held: host_agent_pb2.HeldVersion, segment: HostSegment) -> None:
        """Process a complete version of this host; only rank 0 does."""

    def _on_replaced(self) -> None:
        """Process the replacement of this host's relay; only rank 0 does."""

    @property
    def _address(self) -> list[str]:
        identity = self._client.identity
        return ["", ""] if identity is None else [identity.address, identity.agent_id]


class Rank0HostChannel(HostChannel):
    """The channel on rank 0. It calls `announce(version, seconds)` before a member can have the version, and `send`
    with reports for the coordinator about versions on hosts. `store` writes for the members of `offers`."""

    def __init__(
        self,
        client: RelayClient,
        hosts: Hosts,
        board: RankBoard,
        writer: ShardWriter,
        *,
        members: HostMembers,
        offers: StoreOffers,
        store: StoreWriter,
        announce: Callable[[Version, float], None],
        send: Callable[[worker_pb2.HostVersion], None],
    ) -> None:
        self._members, self._offers, self._store = members, offers, store
        self._announce, self._send = announce, send
        self._changed = threading.Condition()
        self._staged: list[tuple[Version, list[bytes]]] = []
        """Versions staged by this host whose manifests are not complete yet."""
        self._newest: tuple[HostManifest, worker_pb2.HostVersion] | None = None
        """The newest complete manifest, and the message about its version."""
        self._here: tuple[Version, int, HostSegment] | None = None
        """The newest complete version of this host, with generation and host segment."""
        self._needs_store = False
        self._put: Version | None = None
        self._roster: tuple[int, tuple[str, ...], frozenset[str]] = (0, (), frozenset())
        self._overtaken = threading.Event()
        """Set once waiting for other hosts' digests is pointless: there is a newer version, or the channel ends."""
        self._notes: dict[str, dict[str, list[str]]] = {}
        """Maps note keys to contents: the other hosts' notes about the newest version."""
        self._dividing = threading.Lock()
        super().__init__(client, hosts, board, writer)
        self._threads = [
            threading.Thread(target=run, name=f"weights{run.__name__}", daemon=True)
            for run in (self._complete_forever, self._store_forever)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def wants_snapshot(self) -> bool:
        """Return False, because only rank 0 writes to the object store."""
        self._store.check()
        return False

    def publish(self, version: Version, model: nn.Module) -> None:
        self._announce(version, self._publish(version, model))

    def set_members(self, epoch: int, member_ids: Sequence[str], by_host: Collection[str] = ()) -> None:
        with self._changed:
            self._roster = epoch, tuple(member_ids), frozenset(by_host)
        self._divide()

    def acknowledge(self, member_id: str, version: Version, ok: bool, message: str, damaged: bool) -> None:
        self._members.answer(member_id, version, ok, message)
        self._offers.answer(member_id, version, ok, message, damaged)
        with self._changed:  # it may need a snapshot
            self._changed.notify_all()

    def progress(self, member_id: str, version: Version, received_bytes: int = 0, loading: bool = False) -> None:
        self._members.progress(member_id, version, received_bytes, loading)
        self._offers.progress(member_id)

    def interrupt(self, reason: str) -> None:
        self._members.extend()
        with self._changed:
            newest = self._newest
        if newest is not None:
            self._send(newest[1])
        self._divide()
        self._offers.interrupt()

    def close(self) -> None:
        super().close()
        self._overtaken.set()
        with self._changed:
            self._changed.notify_all()
        # The interpreter must not end while a thread is in native code, or the process aborts.
        deadline_s = time.monotonic() + CLOSE_WAIT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self._members.close()
        self._offers.close()
        self._store.close()

    def member_failed(self) -> None:
        """Offer stored versions to members that relays cannot reach."""
        self._divide()

    def _divide(self) -> None:
        """Divide the roster among relays and object store, one thread at a time, so that the newest roster is applied
        last."""
        with self._dividing:
            with self._changed:
                epoch, member_ids, by_host = self._roster
                hosted = [m for m in member_ids if m in by_host and not self._members.failed_often(m)]
                stored = [m for m in member_ids if m not in hosted]
                self._needs_store = bool(stored)
                self._changed.notify_all()
                newest = self._newest
            self._members.set_members(epoch, hosted)
            self._offers.set_members(epoch, stored)
        if stored and newest is not None:
            self._follow(newest[1])

    def _on_staged(self, version: Version, digests: list[bytes]) -> None:
        with self._changed:
            self._staged.append((version, digests))
            self._overtaken.set()
            self._changed.notify_all()

    def _on_held(self, held: host_agent_pb2.HeldVersion, segment: HostSegment) -> None:
        with self._changed:
            self._here = version_of(held), held.generation, segment
            self._changed.notify_all()

    def _on_replaced(self) -> None:
        with self._changed:
            self._here = None

    def _complete_forever(self) -> None:
        while True:
            with self._changed:
                # No deadline: the next version comes when the step ends.
                self._changed.wait_for(lambda: self._staged or self._closed.is_set())
                if self._closed.is_set():
                    return
                version, digests = self._staged.pop(0)
                if self._staged:
                    continue  # a newer version is staged
                self._overtaken.clear()
            try:
                self._complete(version, digests)
            except PacelineError as error:
                log.warning("version %d has no manifest: %s", version.step, error)
            except Exception as error:  # the next version has to get its manifest
                unforeseen.note("the manifest of a version", error)

    def _complete(self, version: Version, digests: list[bytes]) -> None:
        """Make the manifest of a staged version, once all hosts have staged it, and send it to the coordinator."""
        by_source, addresses = {0: iter(digests)}, [self._address]
        for source in range(1, self._hosts.num_hosts):
            document = self._note_of(version, source)
            if document is None:
                return
            by_source[source] = iter([bytes.fromhex(text) for text in document["digests"]])
            addresses.append(document["address"])
        layout = self._writer.manifest
        manifest = layout.of(version, tuple(next(by_source[piece.source]) for piece in layout.pieces))
        data = manifest.to_bytes()
        message = worker_pb2.HostVersion(
            run_id=layout.run_id,
            version=version_message(version),
            manifest_sha256=hashlib.sha256(data).digest(),
            size_bytes=manifest.size_bytes,
            sources=[address for address, _ in addresses],
            source_agent_ids=[agent_id for _, agent_id in addresses],
            token=self._hosts.token,
        )
        staged = host_agent_pb2.StageManifest(run_id=layout.run_id, version=message.version, manifest=data)
        self._stage.send(host_agent_pb2.AgentRequest(manifest=staged))
        self._members.publish(version, manifest.size_bytes)
        with self._changed:
            self._newest = manifest, message
            self._changed.notify_all()
        self._send(message)
        self._follow(message)

    def _note_of(self, version: Version, source: int) -> dict[str, list[str]] | None:
        """Return another host's note about a version; None if this host has staged a newer one in the meantime."""
        key = _key(version, source)
        if key not in self._notes:
            note = self._board.wait(key, self._overtaken)
            if note is None:
                return None
            self._board.remove(key)
            self._notes = {k: v for k, v in self._notes.items() if k.startswith(_key(version, 0)[:-1])}
            self._notes[key] = json.loads(note)
        return self._notes[key]

    def _follow(self, message: worker_pb2.HostVersion) -> None:
        """Make this host's relay complete a version for the object store. With one learner host the version is complete
        already."""
        if not self._needs_store and self._hosts.num_hosts > 1:
            return
        plan = worker_pb2.HostPlan(
            run_id=message.run_id,
            version=message.version,
            manifest_sha256=message.manifest_sha256,
            size_bytes=message.size_bytes,
            upstreams=[worker_pb2.Upstream(addresses=message.sources)],
            token=message.token,
        )
        self._stage.send(host_agent_pb2.AgentRequest(plan=plan))

    def _store_forever(self) -> None:
        while True:
            with self._changed:
                # No deadline: a member without a relay may never come.
                self._changed.wait_for(lambda: self._closed.is_set() or self._is_due() or self._wants_snapshot())
                if self._closed.is_set():
                    return
                due = (self._here, self._newest) if self._is_due() else None
            try:
                if due is None:
                    self._offers.snapshot_ordered()
                    self._store.put_snapshot()
                else:
                    assert due[0] is not None
                    assert due[1] is not None
                    self._put_into_store(*due[0], due[1][0])
            except Unavailable:  # overwritten by a newer version, which will be complete soon
                self._closed.wait(STORE_RETRY_S)
            except Exception as error:
                unforeseen.note("copying weights for the object store", error)
                self._closed.wait(STORE_RETRY_S)

    def _is_due(self) -> bool:
        if not self._needs_store or self._here is None or self._newest is None:
            return False
        return self._put is None or self._put < self._here[0]

    def _wants_snapshot(self) -> bool:
        return self._put is not None and self._offers.wants_snapshot

    def _put_into_store(self, version: Version, generation: int, segment: HostSegment, manifest: HostManifest) -> None:
        """Copy a version from the host's memory, which newer versions reuse, into the object store."""
        flat = empty_flat(manifest.layout)
        with segment.reading(generation):
            flat.copy_(segment.flat())
        self._store.put(version, *whole_slices(views(flat, manifest.layout)))
        with self._changed:
            self._put = version


def agree_on_hosts(client: RelayClient | None, timeout_s: float, device: torch.device, token: bytes) -> Hosts | None:
    """Return the learner's hosts; None if a rank has no relay within `timeout_s`. A collective call. Raises
    InvalidInput, on every rank, if the hosts are in several zones: each step would wait for the link between the
    zones."""
    import torch.distributed as dist

    agent_id, zone = NO_RELAY, ""
    if client is not None and client.wait(timeout_s):
        identity = client.identity
        if identity is not None:
            agent_id, zone = identity.agent_id.encode(), identity.zone
    note = agent_id + hashlib.sha256(zone.encode()).digest()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        notes, rank = [note], 0
    else:
        sent = torch.tensor(list(note), dtype=torch.uint8, device=device)
        gathered = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, sent)
        notes, rank = [bytes(part.tolist()) for part in gathered], dist.get_rank()
    return hosts_of([(note[:16], note[16:]) for note in notes], rank, token)


def hosts_of(notes: Sequence[tuple[bytes, bytes]], rank: int, token: bytes) -> Hosts | None:
    """Return the learner's hosts from (relay id, digest of the zone) of each rank. Raises InvalidInput for several zones."""
    ids = [agent_id for agent_id, _ in notes]
    if NO_RELAY in ids:
        return None
    if len({zone for _, zone in notes}) > 1:
        raise InvalidInput(
            f"the learner's {len(notes)} ranks name different zones (--zone, PACELINE_ZONE): a learner across regions would "
            "wait for the link between them in every layer of every step. Start all its ranks in one zone; rollout and "
            "reward workers may be anywhere"
        )
    distinct = list(dict.fromkeys(ids))
    return Hosts(tuple(distinct.index(relay_id) for relay_id in ids), rank, token)


def piece_algorithm(trusted: bool) -> PieceAlgorithm:
    """Return the algorithm of the digests: a fast algorithm if nobody can have changed the bytes in transit."""
    return "xxh3_128" if trusted else "sha256"


def _key(version: Version, source: int) -> str:
    return f"host-digests/{version.session}/{version.step}/{source}"

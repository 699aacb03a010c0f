"""Publishes one run's weights through the channel of the spec; members may come before the channel exists."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable

from torch import nn

from paceline.calls.connection import is_loopback
from paceline.errors import Conflict
from paceline.groups import Version
from paceline.host.resources import threads_beside
from paceline.learner.collectives import any_over_ranks, broadcast_bytes
from paceline.learner.model.policy import published_dtype
from paceline.learner.weights.channel import WeightChannel
from paceline.learner.weights.delta import DeltaChannel, Rank0DeltaChannel
from paceline.learner.weights.host_channel import HostChannel, Hosts, Rank0HostChannel, agree_on_hosts, piece_algorithm
from paceline.learner.weights.shard_writer import ShardWriter
from paceline.services.common.relay import WAIT_S
from paceline.services.learner.context import RankContext
from paceline.services.learner.rank_group import meeting_host
from paceline.spec import RunSpec
from paceline.v1 import worker_pb2
from paceline.weights.format.manifest import Algorithm
from paceline.weights.hosts.members import PATIENCE, HostMembers
from paceline.weights.progress import PublishResult
from paceline.weights.store.object_store import WeightStore
from paceline.weights.store.offers import StoreOffers
from paceline.weights.store.rank_board import RankBoard, make_board
from paceline.weights.store.store_format import StoreOffer, run_store
from paceline.weights.store.writer import StoreWriter

Warn = Callable[[str], None]


class Publishing:
    """One rank's part in publishing a run's weights. Without `open` nothing is published. `open`, `publish` and
    `write_snapshot` are collective calls; the control plane's thread calls the other methods, which ignore messages of
    another run."""

    def __init__(
        self,
        assignment: worker_pb2.RunAssignment,
        spec: RunSpec,
        rank: RankContext,
        warn: Warn,
        make: Callable[..., WeightChannel] | None = None,
    ) -> None:
        self._assignment, self._spec, self._rank, self._warn = assignment, spec, rank, warn
        self._make = make or make_channel
        self._channel: WeightChannel | None = None
        self._roster: worker_pb2.Epoch | None = None
        self._opening = threading.Lock()
        """Guards the channel and the roster: a roster that comes while the channel opens must reach the channel."""

    def open(self, model: nn.Module) -> None:
        """Make the channel for the versions of `model`. Raises InvalidInput for an object store that cannot be used."""
        self._model = model
        channel = self._make(self._assignment, self._spec, self._rank, self._warn, model)
        with self._opening:
            roster = self._roster or self._rank.assigned.early_roster
            if roster is not None and roster.run_id == self._assignment.run_id:
                channel.set_members(roster.number, roster.member_ids, roster.host_member_ids)
            self._channel = channel

    @property
    def wants_snapshot(self) -> bool:
        """Return whether to call `write_snapshot` on all ranks. Raises the error that ended a thread."""
        return self._channel is not None and self._channel.wants_snapshot

    def write_snapshot(self) -> None:
        if self._channel is not None:
            self._channel.write_snapshot()

    def publish(self, step: int, *, last: bool) -> None:
        """Copy the model as version `step`; the copy is sent while the next step trains. A step below the highest step
        that an engine has acknowledged from an earlier session is not published again, unless it is the run's last
        step."""
        if self._channel is None or (step < self._assignment.publish_from_step and not last):
            return
        self._channel.publish(Version(self._assignment.session, step), self._model)

    def set_members(self, roster: worker_pb2.Epoch) -> None:
        if roster.run_id != self._assignment.run_id:
            return
        with self._opening:
            self._roster = roster
            if self._channel is not None:
                with contextlib.suppress(Conflict):  # the run ends at this very moment
                    self._channel.set_members(roster.number, roster.member_ids, roster.host_member_ids)

    def acknowledge(self, ack: worker_pb2.WeightAck) -> None:
        if self._channel is not None and ack.run_id == self._assignment.run_id:
            version = Version(ack.version.session, ack.version.step)
            self._channel.acknowledge(ack.member_id, version, ack.ok, ack.message, ack.damaged)

    def progress(self, progress: worker_pb2.WeightProgress) -> None:
        if self._channel is not None and progress.run_id == self._assignment.run_id:
            version = Version(progress.version.session, progress.version.step)
            loading = progress.phase in (worker_pb2.WEIGHT_PHASE_RECEIVED, worker_pb2.WEIGHT_PHASE_LOADING)
            self._channel.progress(progress.member_id, version, progress.received_bytes, loading)

    def interrupt(self, reason: str) -> None:
        """Repeat offers that may have been lost while the coordinator was unreachable."""
        if self._channel is not None:
            self._channel.interrupt(reason)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()


TOKEN_BYTES = 32
MOST_CODING_THREADS = 24


def make_channel(
    assignment: worker_pb2.RunAssignment, spec: RunSpec, rank: RankContext, warn: Warn, model: nn.Module
) -> WeightChannel:
    """Return the channel that `weights.channel` names; `warn` adds a sentence to the run's events. A collective call.
    Raises InvalidInput for an object store that cannot be used."""
    factory = _WeightChannelFactory(assignment, spec, rank, warn)
    match spec.weights.channel:
        case "collective":
            return factory.collective(model)
        case "delta":
            return factory.delta()
        case _:
            raise ValueError(f"unknown weights.channel {spec.weights.channel!r}")


class _WeightChannelFactory:
    """Makes the parts that all channels of a run share."""

    def __init__(self, assignment: worker_pb2.RunAssignment, spec: RunSpec, rank: RankContext, warn: Warn) -> None:
        self._run_id = assignment.run_id
        self._weights = spec.weights
        self._rank = rank
        self._warn = warn
        self._reports = WeightReports(assignment.run_id, spec.weights.max_wait_s, rank.report)
        self._dtype = published_dtype(spec.policy, rank.place.device)
        # Each run has a separate object store, because this run must not prune versions of another.
        self._store = WeightStore(run_store(self._weights.store, self._run_id, assignment.directory))
        trusted = is_loopback(rank.place.weights_host) and self._store.is_local
        self._algorithm: Algorithm = "xxh3_64" if trusted else "sha256"

    def collective(self, model: nn.Module) -> WeightChannel:
        """Return the channel by the hosts' relays, or by the object store if a host of the learner has no relay."""
        token = broadcast_bytes(secrets.token_bytes(TOKEN_BYTES))
        hosts = agree_on_hosts(self._rank.relay.client(), WAIT_S, self._rank.place.device, token)
        if hosts is not None:
            return self._by_host(hosts, model)
        if self._rank.place.rank == 0:
            text = (
                "a host of the learner has no relay for weights (see its log); every worker reads weights from "
                f"{self._store.url}, as with weights.channel: delta"
            )
            if self._store.is_local and not is_loopback(self._rank.place.weights_host):
                text += ". If ranks or workers do not share that folder, set weights.store to a place that all of them reach"
            self._warn(text)
        return self.delta(on_device=False)

    def _by_host(self, hosts: Hosts, model: nn.Module) -> HostChannel:
        client, board = self._rank.relay.client(), self._board()
        algorithm = piece_algorithm(is_loopback(self._rank.place.weights_host))
        shards = ShardWriter(model, self._dtype, self._run_id, hosts.host_of_rank, algorithm)
        if self._rank.place.rank != 0:
            return HostChannel(client, hosts, board, shards)
        if (identity := self._rank.relay.identity) is not None:
            self._rank.report(worker_pb2.ConnectRequest(host_agent=identity))

        def on_result(result: PublishResult) -> None:
            self._reports.result(result)
            if not result.ok:
                channel.member_failed()
                if members.failed_often(result.member_id):
                    self._warn(self._fallback(result))

        members = HostMembers(self._weights.max_wait_s, on_result, is_heard=lambda: self._rank.membership.has_stream)
        offers = self._offers()
        channel = Rank0HostChannel(
            client,
            hosts,
            board,
            shards,
            members=members,
            offers=offers,
            store=self._writer(RankBoard(), 0, 1, offers),
            announce=self._reports.staged,
            send=self._reports.host_version,
        )
        return channel

    def _fallback(self, result: PublishResult) -> str:
        return (
            f"{PATIENCE} attempts in a row to bring weights to {result.member_id} failed, the last with version "
            f"{result.version.step}: {result.error}. From now on the member is offered the versions in {self._store.url}"
        )

    def _board(self) -> RankBoard:
        if not meeting_host():
            return make_board("127.0.0.1", "127.0.0.1", broadcast_bytes)
        return make_board(self._rank.place.weights_bind, self._rank.place.weights_host, broadcast_bytes)

    def delta(self, *, on_device: bool = True) -> DeltaChannel:
        """Return the delta channel: all ranks write, rank 0 offers. A copy `on_device` needs memory of the device."""
        board, rank, world_size = self._board(), self._rank.place.rank, self._rank.place.world_size
        if rank != 0:
            return DeltaChannel(self._writer(board, rank, world_size, None), self._dtype, on_device=on_device)
        offers = self._offers()
        writer = self._writer(board, rank, world_size, offers)
        return Rank0DeltaChannel(writer, offers, self._dtype, self._reports.staged, on_device=on_device)

    def _offers(self) -> StoreOffers:
        return StoreOffers(
            run_id=self._run_id,
            url=self._store.url,
            algorithm=self._algorithm,
            max_wait_s=self._weights.max_wait_s,
            send=self._reports.offer,
            on_result=self._reports.result,
        )

    def _writer(self, board: RankBoard, rank: int, world_size: int, offers: StoreOffers | None) -> StoreWriter:
        return StoreWriter(
            store=self._store,
            board=board,
            run_id=self._run_id,
            rank=rank,
            world_size=world_size,
            algorithm=self._algorithm,
            anchor_interval=self._weights.anchor_interval,
            any_rank=lambda fact: any_over_ranks([fact], self._rank.place.device)[0] if world_size > 1 else fact,
            on_stored=offers.announce if offers else lambda stored: None,
            oldest_held=offers.oldest_held if offers else lambda: None,
            threads=self._coding_threads(),
        )

    def _coding_threads(self) -> int:
        """Return the threads that code versions: on GPUs a rank's share of the free cores, on CPUs 1."""
        if self._rank.place.device.type != "cuda":
            return 1
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or self._rank.place.world_size)
        return min(MOST_CODING_THREADS, max(1, threads_beside(ranks_here) * 3 // 4))


FAILURES = {
    "": worker_pb2.PUBLISH_FAILURE_UNSPECIFIED,
    "link": worker_pb2.PUBLISH_FAILURE_LINK,
    "silent": worker_pb2.PUBLISH_FAILURE_SILENT,
    "refused": worker_pb2.PUBLISH_FAILURE_REFUSED,
}


class WeightReports:
    """Sends the reports of one run's channel, from any thread. `send` queues a report."""

    def __init__(self, run_id: str, max_wait_s: float, send: Callable[[worker_pb2.ConnectRequest], None]) -> None:
        self._run_id, self._max_wait_s, self._send = run_id, max_wait_s, send

    def staged(self, version: Version, gather_s: float) -> None:
        """Report that a version is staged; its copy took `gather_s` seconds."""
        staged = worker_pb2.StagedReport(run_id=self._run_id, gather_s=gather_s)
        staged.version.session, staged.version.step = version
        self._send(worker_pb2.ConnectRequest(staged=staged))

    def offer(self, offer: StoreOffer) -> None:
        self._send(worker_pb2.ConnectRequest(weight_offer=offer.to_proto(self._max_wait_s)))

    def host_version(self, version: worker_pb2.HostVersion) -> None:
        """Report a version that this learner's hosts hold."""
        self._send(worker_pb2.ConnectRequest(host_version=version))

    def result(self, result: PublishResult) -> None:
        """Report the result of an attempt to bring a version to a member."""
        report = worker_pb2.PublishReport(
            run_id=self._run_id,
            member_id=result.member_id,
            epoch=result.epoch,
            ok=result.ok,
            error=result.error,
            size_bytes=result.size_bytes,
            publish_s=result.transfer_s + result.ack_s,
            transfer_s=result.transfer_s,
            ack_s=result.ack_s,
            failure=FAILURES[result.failure],
        )
        report.version.session, report.version.step = result.version
        self._send(worker_pb2.ConnectRequest(publish=report))

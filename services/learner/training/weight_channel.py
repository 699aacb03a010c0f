"""Construction of a run's weight channel, as the spec names it. Its offers and results go to `WeightReports`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable

import torch
from torch import nn

from learner.collectives import any_over_ranks, broadcast_bytes
from learner.weights.catch_up import CatchUp
from learner.weights.channel import WeightChannel
from learner.weights.collective import CollectiveChannel, Rank0CollectiveChannel
from learner.weights.delta import DeltaChannel, Rank0DeltaChannel
from learner.weights.hosts.channel import (
    HostChannel,
    Hosts,
    Rank0HostChannel,
    agree_on_hosts,
    piece_algorithm,
)
from learner.weights.hosts.members import HostMembers
from learner.weights.hosts.shard_writer import ShardWriter
from learner.weights.publish_result import PublishResult
from learner.weights.publisher import Publisher
from learner.weights.rank_board import RankBoard, make_board
from learner.weights.store.chain import Stored
from learner.weights.store.offers import StoreOffers
from learner.weights.store.writer import StoreWriter
from paceline.address import is_loopback
from paceline.groups import Version
from paceline.host.cores import threads_beside
from paceline.models.loading import resolved_dtype
from paceline.spec import RunSpec
from paceline.tls.folder import tls_folder
from paceline.weights.manifest import Algorithm
from paceline.weights.object_store import WeightStore
from paceline.weights.store_format import run_store
from protos.paceline.v1 import worker_pb2
from services.common.host_agent import WAIT_S, goes_by_host
from services.learner.context import RankContext
from services.learner.rank_group import meeting_host
from services.learner.training.weight_reports import WeightReports

TOKEN_BYTES = 32
MOST_CODING_THREADS = 24


def make_channel(
    assignment: worker_pb2.RunAssignment,
    spec: RunSpec,
    rank: RankContext,
    warn: Callable[[str], None],
    model: nn.Module,
) -> WeightChannel:
    """Return the channel that `weights.channel` names; `warn` puts a sentence into the run's events. A collective call. Raises
    InvalidInput for an object store that cannot be used."""
    factory = _WeightChannelFactory(assignment, spec, rank, warn)
    match spec.weights.channel:
        case "collective":
            return factory.collective(model, by_host=goes_by_host(spec))
        case "delta":
            return factory.delta()
        case _:
            raise ValueError(f"unknown weights.channel {spec.weights.channel!r}")


class _WeightChannelFactory:
    """The parts that all channels of a run have in common."""

    def __init__(
        self,
        assignment: worker_pb2.RunAssignment,
        spec: RunSpec,
        rank: RankContext,
        warn: Callable[[str], None],
    ) -> None:
        self._run_id = assignment.run_id
        self._weights = spec.weights
        self._cluster = spec.cluster
        self._rank = rank
        self._warn = warn
        self._reports = WeightReports(assignment.run_id, spec.weights.max_wait_s, rank.report, warn)
        precision = spec.policy.generation_precision
        if spec.policy.lora_cfg.enabled:
            precision = "float32"  # an adapter is small, and only its merge should round
        self._dtype = getattr(torch, resolved_dtype(precision, rank.device.type))
        # Each run has a store, because versions of another run must not be pruned here.
        self._store = WeightStore(run_store(self._weights.store, self._run_id, assignment.directory))
        trusted = is_loopback(rank.weights_host) and self._store.is_local
        self._algorithm: Algorithm = "xxh3_64" if trusted else "sha256"

    def collective(self, model: nn.Module, *, by_host: bool) -> WeightChannel:
        """Return the collective channel: agents of hosts, and for workers without one links, and the object store for those of
        them that join."""
        hosts = self._hosts() if by_host else None
        if self._rank.rank != 0:
            return CollectiveChannel(self._dtype) if hosts is None else self._member_channel(hosts, model)
        publisher, catch_up = self._links()
        if hosts is None:
            return Rank0CollectiveChannel(publisher, catch_up, self._dtype, self._reports.staged)
        return self._host_channel(hosts, model, publisher, catch_up)

    def _hosts(self) -> Hosts | None:
        """Return the learner's hosts, if all of them have agents. A collective call."""
        token = broadcast_bytes(secrets.token_bytes(TOKEN_BYTES))
        hosts = agree_on_hosts(self._rank.agent.client(), WAIT_S, self._rank.device, token)
        if hosts is None and self._rank.rank == 0:
            self._warn(
                "a host of the learner has no agent for weights, its log says why; every worker gets its own copy over a link"
            )
        return hosts

    def _member_channel(self, hosts: Hosts, model: nn.Module) -> HostChannel:
        return HostChannel(self._rank.agent.client(), hosts, self._board(), self._shard_writer(hosts, model))

    def _host_channel(
        self, hosts: Hosts, model: nn.Module, publisher: Publisher, catch_up: CatchUp
    ) -> Rank0HostChannel:
        if (identity := self._rank.agent.identity) is not None:
            self._rank.report(worker_pb2.ConnectRequest(host_agent=identity))

        def on_result(result: PublishResult) -> None:
            self._reports.result(result)
            if not result.ok:
                channel.member_failed()

        channel = Rank0HostChannel(
            self._rank.agent.client(),
            hosts,
            self._board(),
            self._shard_writer(hosts, model),
            members=HostMembers(
                self._weights.max_wait_s,
                on_result,
                is_heard=lambda: self._rank.membership.has_stream,
            ),
            publisher=publisher,
            catch_up=catch_up,
            announce=self._reports.staged,
            send=self._reports.host_version,
        )
        return channel

    def _shard_writer(self, hosts: Hosts, model: nn.Module) -> ShardWriter:
        algorithm = piece_algorithm(is_loopback(self._rank.weights_host))
        return ShardWriter(model, self._dtype, self._run_id, hosts.host_of_rank, algorithm)

    def _board(self) -> RankBoard:
        if not meeting_host():
            return make_board("127.0.0.1", "127.0.0.1")
        return make_board(self._rank.weights_bind, self._rank.weights_host)

    def _links(self) -> tuple[Publisher, CatchUp]:
        """Return what serves members without an agent."""
        backend = self._backend()

        def on_link_result(result: PublishResult) -> None:
            catch_up.link_ended(result)
            self._reports.result(result)

        publisher = Publisher(
            run_id=self._run_id,
            send_offer=self._reports.offer,
            on_result=on_link_result,
            bucket_bytes=self._weights.bucket_mb << 20,
            max_wait_s=self._weights.max_wait_s,
            bind_host="127.0.0.1" if self._is_kept_here(backend) else self._rank.weights_bind,
            advertise_host=self._rank.weights_host,
            backend=backend,
            allow_plaintext=self._weights.allow_plaintext_network,
        )
        catch_up = CatchUp(
            publisher=publisher,
            store=self._store,
            run_id=self._run_id,
            algorithm=self._algorithm,
            anchor_interval=self._weights.anchor_interval,
            max_wait_s=self._weights.max_wait_s,
            send=self._reports.offer,
            on_result=self._reports.result,
            warn=self._warn,
        )
        return publisher, catch_up

    def delta(self) -> DeltaChannel:
        """Return the delta channel: every rank writes, rank 0 makes the offers."""
        if self._rank.rank != 0:
            return DeltaChannel(
                self._writer(on_stored=lambda stored: None, oldest_held=lambda: None), self._dtype
            )
        offers = StoreOffers(
            run_id=self._run_id,
            url=self._store.url,
            algorithm=self._algorithm,
            max_wait_s=self._weights.max_wait_s,
            send=self._reports.offer,
            on_result=self._reports.result,
        )
        writer = self._writer(on_stored=offers.announce, oldest_held=offers.oldest_held)
        return Rank0DeltaChannel(writer, offers, self._dtype, self._reports.staged)

    def _writer(
        self, *, on_stored: Callable[[Stored], None], oldest_held: Callable[[], Version | None]
    ) -> StoreWriter:
        return StoreWriter(
            store=self._store,
            board=self._board(),
            run_id=self._run_id,
            rank=self._rank.rank,
            world_size=self._rank.world_size,
            algorithm=self._algorithm,
            anchor_interval=self._weights.anchor_interval,
            any_rank=lambda fact: any_over_ranks([fact], self._rank.device)[0],
            on_stored=on_stored,
            oldest_held=oldest_held,
            threads=self._coding_threads(),
        )

    def _coding_threads(self) -> int:
        """Return the threads that code versions: a rank's share of what training on GPUs leaves of the cores, 1 on CPUs."""
        if self._rank.device.type != "cuda":
            return 1
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or self._rank.world_size)
        return min(MOST_CODING_THREADS, max(1, threads_beside(ranks_here) * 3 // 4))

    def _is_kept_here(self, backend: str) -> bool:
        """Return whether every link beyond this host is refused (`form_link`), so that nothing has to listen for them."""
        return backend == "gloo" and tls_folder() is not None and not self._weights.allow_plaintext_network

    def _backend(self) -> str:
        backend = self._weights.backend
        if backend != "auto":
            return backend
        # Only workers of this host reach a learner on loopback, and `cluster` describes the processes of one host.
        one_host = is_loopback(self._rank.weights_host) or bool(self._cluster.rollout_gpus)
        return "shared" if one_host and self._rank.device.type == "cuda" else "gloo"

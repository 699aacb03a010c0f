"""Construction of a run's weight channel, as the spec names it. Its offers and results go to `WeightReports`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from learner.collectives import any_over_ranks
from learner.weights.catch_up import CatchUp
from learner.weights.channel import WeightChannel
from learner.weights.collective import CollectiveChannel, Rank0CollectiveChannel
from learner.weights.delta import DeltaChannel, Rank0DeltaChannel
from learner.weights.publish_result import PublishResult
from learner.weights.publisher import Publisher
from learner.weights.rank_board import make_board
from learner.weights.store.chain import Stored
from learner.weights.store.offers import StoreOffers
from learner.weights.store.writer import StoreWriter
from paceline.address import is_loopback
from paceline.groups import Version
from paceline.models.loading import resolved_dtype
from paceline.spec import RunSpec
from paceline.weights.manifest import Algorithm
from paceline.weights.object_store import WeightStore
from paceline.weights.store_format import run_store
from protos.paceline.v1 import worker_pb2
from services.learner.context import RankContext
from services.learner.training.weight_reports import WeightReports


def make_channel(
    assignment: worker_pb2.RunAssignment, spec: RunSpec, rank: RankContext, warn: Callable[[str], None]
) -> WeightChannel:
    """Return the channel that `weights.channel` names; `warn` puts a sentence into the run's events. A collective call. Raises
    InvalidInput for an object store that cannot be used."""
    factory = _WeightChannelFactory(assignment, spec, rank, warn)
    match spec.weights.channel:
        case "collective":
            return factory.collective()
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

    def collective(self) -> CollectiveChannel:
        """Return the collective channel: links on rank 0, and the object store for members that join."""
        if self._rank.rank != 0:
            return CollectiveChannel(self._dtype)
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
            bind_host=self._rank.weights_bind,
            advertise_host=self._rank.weights_host,
            backend=backend,
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
        return Rank0CollectiveChannel(publisher, catch_up, self._dtype, self._reports.staged)

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
            board=make_board(self._rank.weights_bind, self._rank.weights_host),
            run_id=self._run_id,
            rank=self._rank.rank,
            world_size=self._rank.world_size,
            algorithm=self._algorithm,
            anchor_interval=self._weights.anchor_interval,
            any_rank=lambda fact: any_over_ranks([fact], self._rank.device)[0],
            on_stored=on_stored,
            oldest_held=oldest_held,
        )

    def _backend(self) -> str:
        backend = self._weights.backend
        if backend == "nccl":
            backend = "auto"
            self._warn(
                "weights.backend is 'nccl', which this version no longer has; weights go as with 'auto'. Remove it from "
                "the spec of later runs"
            )
        if backend != "auto":
            return backend
        # Only workers of this host reach a learner on loopback, and `cluster` describes the processes of one host.
        one_host = is_loopback(self._rank.weights_host) or bool(self._cluster.rollout_gpus)
        return "shared" if one_host and self._rank.device.type == "cuda" else "gloo"

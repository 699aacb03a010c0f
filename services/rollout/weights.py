"""Brings weights to a rollout worker's engine: receives versions from its host's memory or from the object store, loads
them into the engine, and answers the learner. Offers come on the event loop. Weights come on the receivers' threads,
which wait for one another and for the engine; the engine swaps weights between two decode steps. The engine's version
only grows."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import Coroutine, Mapping
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.errors import Conflict, PacelineError, Unavailable, WireError, first_line
from paceline.groups import Version
from paceline.rollout.engine import Engine
from paceline.services.common.worker.membership import Membership
from paceline.v1 import worker_pb2
from paceline.weights.format.packing import check_fits
from paceline.weights.hosts.client import RelayClient
from paceline.weights.hosts.host_weights import HostWeights
from paceline.weights.hosts.receiver import HostReceiver, check_plan
from paceline.weights.store.receiver import StoreReceiver
from paceline.weights.store.store_format import StoreOffer

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
REPORT_S = 1.0
"""Seconds between two reports that weights are being received or loaded; at most a quarter of the allowed silence."""
ENDING = "this worker is ending"
ResultT = TypeVar("ResultT")
PHASES = {"receiving": worker_pb2.WEIGHT_PHASE_RECEIVING, "loading": worker_pb2.WEIGHT_PHASE_LOADING}


class RolloutWeights:
    """Receives the weights of one run for one engine. Create the object on the event loop."""

    def __init__(
        self,
        run_id: str,
        member_id: str,
        membership: Membership,
        engine: Engine,
        max_wait_s: float,
        store_url: str,
        relay: RelayClient | None = None,
    ):
        """`store_url` is the folder of the run's stored weights, `relay` the connection to this host's relay."""
        self._store_url = store_url
        self._run_id, self._member_id = run_id, member_id
        self._membership, self._engine = membership, engine
        self._loop = asyncio.get_running_loop()
        self._swapping = threading.Lock()
        self._pause_s = self._swap_s = 0.0
        self._report_s = min(REPORT_S, max_wait_s / 4)
        self._last_yes: worker_pb2.WeightAck | None = None
        self._store_receiver = StoreReceiver(run_id=run_id, on_weights=self._on_weights, on_ack=self._on_ack)
        self._relay = relay
        self._host_receiver: HostReceiver | None = None
        if relay is not None:
            self._host_receiver = HostReceiver(
                run_id=run_id,
                client=relay,
                on_weights=self._on_weights,
                on_ack=lambda version, ok, message, transfer: self._on_ack(version, ok, message, transfer=transfer),
                on_relay=self._report_relay,
            )

    def take_plan(self, plan: worker_pb2.HostPlan) -> None:
        """Pass on the coordinator's plan, which tells this host's relay where to read a version."""
        if self._host_receiver is None:
            return
        try:
            check_plan(plan)
            check_fits(plan.size_bytes)
            self._host_receiver.take_plan(plan, self._engine.version)
        except PacelineError as error:
            version = Version(plan.version.session, plan.version.step)
            self._on_ack(version, False, first_line(error))

    def offer(self, offer: worker_pb2.WeightOffer) -> None:
        """Accept the learner's offer of a stored version; if the offer is invalid or fails, answer with an error."""
        try:
            stored = StoreOffer.from_proto(offer)
            if stored.url != self._store_url:
                raise WireError(
                    f"weights are offered in {stored.url[:200]!r}, but the run's weights are in {self._store_url!r}"
                )
            check_fits(stored.snapshot_bytes)
            self._store_receiver.offer(stored)
        except Exception as error:
            if not isinstance(error, PacelineError):
                log.exception("a weight offer failed")
            version = Version(offer.version.session, offer.version.step)
            self._on_ack(version, False, first_line(error))

    async def report_progress(self) -> None:
        """Tell the learner at intervals that weights are being received or loaded. Runs until cancelled."""
        while True:
            await asyncio.sleep(self._report_s)
            by_host = self._host_receiver.at_work if self._host_receiver is not None else ()
            at_work = {each.version: each for each in (*by_host, *self._store_receiver.at_work)}
            for version, progress in at_work.items():
                if self._membership.waiting_reports:
                    break  # they would be outdated on arrival
                message = worker_pb2.WeightProgress(
                    run_id=self._run_id,
                    member_id=self._member_id,
                    phase=PHASES[progress.phase],
                    received_bytes=progress.received_bytes,
                )
                message.version.session, message.version.step = version
                await self._membership.report(worker_pb2.ConnectRequest(weight_progress=message))

    async def answer_again(self) -> None:
        """Acknowledge the last version again, because the answer may have been lost with the coordinator's connection."""
        if self._last_yes is not None:
            await self._membership.report(worker_pb2.ConnectRequest(weight_ack=self._last_yes))

    def expelled(self, expelled: worker_pb2.Expelled) -> None:
        """Keep the current version after a missed deadline, and take part again in the next roster."""
        version = None if self._engine.version is None else tuple(self._engine.version)
        log.warning(
            "this worker is expelled from epoch %d and keeps version %s: %s", expelled.epoch, version, expelled.reason
        )

    def close(self) -> None:
        self._store_receiver.close()
        if self._host_receiver is not None:
            self._host_receiver.close()

    def _on_weights(self, version: Version, weights: Mapping[str, torch.Tensor]) -> None:
        # The relay and the object store may bring weights at once, and others may receive into the segment.
        with self._swapping, weights.reading() if isinstance(weights, HostWeights) else nullcontext():
            serving = self._engine.version
            if serving is not None and version <= serving:
                if version == serving:
                    return
                raise Conflict(
                    f"version {tuple(version)} came after {tuple(serving)}, which this worker serves already"
                )
            started_s = time.monotonic()
            swap = self._run_in_loop(self._engine.update_weights(version, weights))
            try:  # The engine answers or raises; the learner has a separate deadline.
                self._pause_s = swap.result()
            except concurrent.futures.CancelledError:
                raise Unavailable(ENDING) from None
            self._swap_s = time.monotonic() - started_s

    def _report_relay(self) -> None:
        if self._relay is not None and (identity := self._relay.identity) is not None:
            report = self._membership.report(worker_pb2.ConnectRequest(host_agent=identity))
            with suppress(Unavailable):
                self._run_in_loop(report)

    def _run_in_loop(self, coroutine: Coroutine[Any, Any, ResultT]) -> concurrent.futures.Future[ResultT]:
        """Start a coroutine in the service's loop, from a receiver's thread. Raises Unavailable if the loop has ended."""
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise Unavailable(ENDING) from None

    def _on_ack(
        self,
        version: Version,
        ok: bool,
        message: str,
        damaged: bool = False,
        transfer: worker_pb2.HostTransfer | None = None,
    ) -> None:
        ack = worker_pb2.WeightAck(
            run_id=self._run_id,
            member_id=self._member_id,
            ok=ok,
            message=message,
            pause_s=self._pause_s,
            swap_s=self._swap_s,
            damaged=damaged,
        )
        ack.version.session, ack.version.step = version
        if transfer is not None:
            ack.host_transfer.CopyFrom(transfer)
        if ok:
            self._last_yes = ack
        report = self._membership.report(worker_pb2.ConnectRequest(weight_ack=ack))
        with suppress(Unavailable):
            self._run_in_loop(report)

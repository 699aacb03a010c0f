"""Gives new weights to a running vLLM: every worker verifies them while it decodes, and loads them between two steps.

The weights lie in a segment of host memory, which every worker maps once; each worker verifies its part of them while
generation goes on. When all parts are verified, generation pauses, the workers load their parts, and generation resumes
with an empty cache. If running sequences keep their keys and values, the cache is kept, but new requests find only the
keys and values of the new version in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline.groups import Version
from paceline.rollout.vllm.arguments import replicas
from paceline.rollout.vllm.concurrency import ConcurrencyLimit
from paceline.rollout.vllm.receipts import ReadOrder, Receipts
from paceline.rollout.vllm.requests import label_of
from paceline.spec import RunSpec
from paceline.weights.hosts.host_weights import HostWeights, SegmentPair

if TYPE_CHECKING:
    from paceline.rollout.vllm.reports import Reports

READ_TIMEOUT_S = 300.0
"""Seconds in which the workers must read and verify new weights, while they continue to decode."""
RESUME_TIMEOUT_S = 60.0
"""Seconds for which `swap` waits for the next token; this wait only measures the pause."""


class WeightUpdates:
    """Updates of one AsyncLLM, on its loop, one at a time."""

    def __init__(self, llm: Any, spec: RunSpec, reports: list[Reports], concurrency: ConcurrencyLimit) -> None:
        self._llm = llm
        self._reports = reports
        self._concurrency = concurrency
        self._receipts = Receipts(replicas(spec.policy))
        self._segments = SegmentPair()
        self._in_flight = spec.async_grpo.in_flight_weight_updates
        self._recompute_after = spec.async_grpo.recompute_after_updates
        self.verified_bytes: list[int] = []
        """For each worker, the number of bytes of the last version that it has verified."""
        self._kept_updates = 0
        """Number of updates since keys and values of running sequences were computed again."""
        self.label = ""
        """Label of the model's version, the salt of requests in the prefix cache: changed during the pause, so that no
        keys and values of other weights are found under it."""

    @contextlib.asynccontextmanager
    async def read(self, weights: Mapping[str, Tensor]) -> AsyncIterator[None]:
        """Let the workers map and verify whole `weights`, under all names, for a `swap` within this context. Weights
        that are not in a segment yet are copied into one. Raises Unavailable, WireError or InvalidInput if the
        workers could not read them, found other bytes, or found NaN; no model has changed then."""
        if isinstance(weights, HostWeights):
            await self._verify(weights)
            yield
            return
        packed = await asyncio.to_thread(HostWeights.packed, weights, self._segments, READ_TIMEOUT_S)
        try:
            await self._verify(packed)
            yield
        finally:
            self._segments.release(packed.segment)

    async def _verify(self, weights: HostWeights) -> None:
        order = ReadOrder(
            number=self._receipts.next_order(),
            segment=weights.segment.path,
            generation=weights.generation,
            manifest=weights.manifest.to_bytes(),
            digests=weights.state == "received",
            receipts=self._receipts.path,
            num_readers=self._receipts.num_readers,
        )
        await self._llm.collective_rpc("paceline_read_weights", kwargs=dataclasses.asdict(order))
        self.verified_bytes = await self._receipts.verified(weights.manifest.content_hash, order.number, READ_TIMEOUT_S)

    async def loaded_bytes(self) -> list[int]:
        """Return the bytes that each worker loads of a version; with data parallelism, of one replica."""
        return list(await self._llm.collective_rpc("paceline_loaded_bytes"))

    async def swap(self, version: Version, in_hand: Callable[[], int]) -> float:
        """Pause, load the weights that were read, and resume; `in_hand` counts the engine's requests. Return the
        seconds without a token, up to the first token after the pause, so that recomputing keys and values counts.
        Without in-flight updates running sequences are decoded to their end first; this time does not count. An error
        leaves the engine in an unknown state."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        started_s = time.monotonic()
        self._kept_updates += 1
        recompute = self._recompute_after is not None and self._kept_updates >= self._recompute_after
        # Not `AsyncLLM.pause_generation`, which sleeps 20 ms afterwards for callers that need the last outputs first. Here
        # the engine core assigns the versions, so it does not matter when outputs arrive.
        await self._llm.engine_core.pause_scheduler_async(
            mode="keep" if self._in_flight else "wait", clear_cache=recompute
        )
        running = min(sum(report.latest.running for report in self._reports), in_hand())
        if not self._in_flight:
            started_s, running = time.monotonic(), 0
        if recompute:
            self._kept_updates = 0
            self._concurrency.ignore_preemptions(running)
        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info={}))
        await self._llm.finish_weight_update(label_of(version))
        self.label = label_of(version)
        paused_s = self._last_token_s() if running else started_s
        resumed_s = time.monotonic()
        await self._llm.resume_generation()
        while running and in_hand() and time.monotonic() < resumed_s + RESUME_TIMEOUT_S:
            if (first_s := self._last_token_s()) > resumed_s:
                return first_s - paused_s
            await asyncio.sleep(0.001)
        return resumed_s - paused_s

    def _last_token_s(self) -> float:
        return max(report.last_token_s for report in self._reports)

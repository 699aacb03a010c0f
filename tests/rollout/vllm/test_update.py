"""Updates of a vLLM whose workers are a slow reader here: nothing is loaded that was not read and verified."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.errors import InvalidInput
from paceline.rollout.vllm.concurrency import ConcurrencyLimit
from paceline.rollout.vllm.receipts import ReadOrder, SegmentReader
from paceline.rollout.vllm.update import WeightUpdates
from paceline.spec import RunSpec
from paceline.weights.hosts.host_weights import HostWeights, SegmentPair

LATE_S = 0.1
"""Delay of a reader after its order: anyone that does not wait for it is earlier."""


class SlowWorker:
    """Answers an order at once, like vLLM's workers, and reads later; `done` has what was read and loaded, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self._reader = SegmentReader(0, torch.device("cpu"))

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        assert method == "paceline_read_weights"
        asyncio.get_running_loop().call_later(LATE_S, self._read, ReadOrder(**kwargs))

    def _read(self, order: ReadOrder) -> None:
        try:
            self._reader.read(order, lambda seen: self.done.append(f"read {seen.tensors['norm'][0]:g}"))
        except InvalidInput:
            self.done.append("refused")


def by_hosts(value: float, segments: SegmentPair) -> HostWeights:
    """Weights as a host's relay brings them: compared by it, so their manifest, the same for all versions, has no
    checksums."""
    packed = HostWeights.packed({"norm": torch.full((8,), value)}, segments, 0)
    layout = packed.manifest.with_checksums({"norm": ""})
    return HostWeights(packed.segment, packed.generation, layout, "compared")


@pytest.fixture
def worker() -> SlowWorker:
    return SlowWorker()


@pytest.fixture
def updates(worker: SlowWorker, make_spec: Callable[..., RunSpec], make_model: Callable[..., Any]) -> WeightUpdates:
    return WeightUpdates(worker, make_spec(make_model()), [], ConcurrencyLimit(sure=1, most=1))


async def load(updates: WeightUpdates, worker: SlowWorker, weights: HostWeights) -> None:
    async with updates.read(weights):
        worker.done.append("load")


async def test_a_version_is_loaded_after_it_was_read_also_where_the_one_before_had_its_generation(
    updates: WeightUpdates, worker: SlowWorker
) -> None:
    first, second = (by_hosts(value, segments) for value, segments in ((1.0, SegmentPair()), (2.0, SegmentPair())))
    assert (first.generation, first.manifest) == (second.generation, second.manifest)
    await load(updates, worker, first)
    await load(updates, worker, second)
    assert worker.done == ["read 1", "load", "read 2", "load"]


async def test_a_refused_version_says_nothing_about_the_next(updates: WeightUpdates, worker: SlowWorker) -> None:
    bad, good = (by_hosts(value, SegmentPair()) for value in (float("nan"), 2.0))
    with pytest.raises(InvalidInput, match="NaN"):
        await load(updates, worker, bad)
    await load(updates, worker, good)
    assert worker.done == ["refused", "read 2", "load"]

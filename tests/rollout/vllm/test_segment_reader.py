"""Readers of a segment in the workers' processes: mapped once, each its part, never overwritten bytes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from paceline.errors import InvalidInput, PacelineError, Unavailable, WireError
from paceline.rollout.vllm.receipts import LoadRecord, ReadOrder, ReadWeights, Receipts, SegmentReader
from paceline.weights.hosts.host_weights import HostWeights, SegmentPair

CPU = torch.device("cpu")
READER = """
import json, sys
import torch
from paceline.rollout.vllm.receipts import ReadOrder
from paceline.rollout.vllm.receipts import SegmentReader
order = json.loads(sys.argv[1])
order["manifest"] = bytes.fromhex(order["manifest"])
def take(weights):
    print(sorted((name, str(tensor.dtype), tensor.tolist()) for name, tensor in weights.tensors.items()))
for reader in range(order["num_readers"]):
    SegmentReader(reader, torch.device("cpu")).read(ReadOrder(**order), take)
"""


def tensors() -> dict[str, torch.Tensor]:
    tied = torch.arange(6, dtype=torch.float32).view(2, 3)
    return {"embed": tied, "head": tied, "norm": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}


def order_for(weights: HostWeights, receipts: Receipts, digests: bool = True) -> ReadOrder:
    return ReadOrder(
        number=receipts.next_order(),
        segment=weights.segment.path,
        generation=weights.generation,
        manifest=weights.manifest.to_bytes(),
        digests=digests,
        receipts=receipts.path,
        num_readers=receipts.num_readers,
    )


class Model:
    """A worker's model of two layers, the first split by rows and the second by columns over two workers."""

    def __init__(self, rank: int) -> None:
        self.rows, self.columns, self.norm = torch.zeros(2, 6), torch.zeros(4, 3), torch.zeros(6)
        self.rank = rank

    def load_weights(self, weights: Any) -> None:
        found = dict(weights)
        self.rows.copy_(found["rows"].narrow(0, 2 * self.rank, 2))
        self.columns.copy_(found["columns"].narrow(1, 3 * self.rank, 3))
        self.put_off = found["norm"]
        torch.empty(4, 6, device="meta").copy_(found["rows"])  # as vLLM counts what a loader would copy

    def finalize(self) -> None:
        self.norm.copy_(self.put_off)


def split_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(*shape, generator=generator)
        for name, shape in (("rows", (4, 6)), ("columns", (4, 6)), ("norm", (6,)))
    }


async def test_readers_in_another_process_see_every_tensor_and_verify_a_part_each() -> None:
    weights, receipts = HostWeights.packed(tensors(), SegmentPair(), 0), Receipts(2)
    number = (given := order_for(weights, receipts)).number
    order = {**dataclasses.asdict(given), "manifest": given.manifest.hex()}
    command = [sys.executable, "-c", READER, json.dumps(order)]
    seen = await asyncio.to_thread(subprocess.run, command, stdout=subprocess.PIPE, check=True)
    expected = [
        ("embed", "torch.float32", [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]),
        ("head", "torch.float32", [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]),
        ("norm", "torch.bfloat16", [1.5, -2.0]),
    ]
    assert seen.stdout.decode().splitlines() == [str(expected)] * 2
    assert await receipts.verified(weights.manifest.content_hash, number, 0) == [24, 4]


@pytest.mark.parametrize(
    ("change", "digests", "error", "message"),
    [
        (1.0, True, WireError, "tensor 'norm' arrived with"),
        (float("nan"), False, InvalidInput, "weight 'norm' has NaN"),
    ],
)
async def test_other_bytes_and_nan_are_found_by_the_worker_whose_part_they_are(
    change: float, digests: bool, error: type[PacelineError], message: str
) -> None:
    weights, receipts = HostWeights.packed(tensors(), SegmentPair(), 0), Receipts(2)
    weights["norm"][1] = change
    order = order_for(weights, receipts, digests)
    SegmentReader(0, CPU).read(order, lambda _: None)
    with pytest.raises(error, match=message):
        SegmentReader(1, CPU).read(order, lambda _: pytest.fail("it was taken"))
    with pytest.raises(error, match=f"worker 1 of the engine: {message}"):
        await receipts.verified(weights.manifest.content_hash, order.number, 0)


def test_a_segment_is_mapped_once_and_the_two_last_ones_stay_mapped() -> None:
    segments, receipts, reader = SegmentPair(), Receipts(1), SegmentReader(0, CPU)
    places: list[int] = []

    def read(weights: HostWeights) -> None:
        reader.read(order_for(weights, receipts), lambda seen: places.append(seen.tensors["norm"].data_ptr()))

    for _ in range(3):
        weights = HostWeights.packed(tensors(), segments, 0)
        read(weights)
        segments.release(weights.segment)
    assert len(set(places)) == 1
    with weights.reading():
        read(HostWeights.packed(tensors(), segments, 0))
    assert len(set(places)) == 2
    assert len(reader._mapped) == 2
    read(HostWeights.packed({**tensors(), "more": torch.ones(5000)}, segments, 0))
    assert len(reader._mapped) == 2


async def test_weights_that_were_overwritten_or_are_gone_are_not_read() -> None:
    segments, receipts, reader = SegmentPair(), Receipts(1), SegmentReader(0, CPU)
    old = HostWeights.packed(tensors(), segments, 0)
    order = order_for(old, receipts)
    segments.release(old.segment)
    new = HostWeights.packed(tensors(), segments, 0)
    with pytest.raises(Unavailable, match="generation 1 of the segment was overwritten"):
        reader.read(order, lambda _: pytest.fail("it was taken"))
    with pytest.raises(Unavailable, match="worker 0 of the engine: generation 1"):
        await receipts.verified(old.manifest.content_hash, order.number, 0)
    order = order_for(new, receipts)
    del old, new
    del segments
    with pytest.raises(OSError, match="No such file"):
        reader.read(order, lambda _: pytest.fail("it was taken"))
    with pytest.raises(Unavailable, match="No such file"):
        await receipts.verified("", order.number, 0)


async def test_the_receipt_comes_after_the_weights_were_taken() -> None:
    weights, receipts = HostWeights.packed(tensors(), SegmentPair(), 0), Receipts(1)
    order = order_for(weights, receipts)
    missing: list[bool] = []

    def take(_: ReadWeights) -> None:
        try:
            asyncio.run(receipts.verified(weights.manifest.content_hash, order.number, 0))
        except Unavailable:
            missing.append(True)

    await asyncio.to_thread(SegmentReader(0, CPU).read, order, take)
    assert missing == [True]
    assert await receipts.verified(weights.manifest.content_hash, order.number, 0) == [28]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_loads_its_part_of_every_version_and_knows_which_bytes_that_are(rank: int) -> None:
    segments, receipts = SegmentPair(), Receipts(2)
    model, reader = Model(rank), SegmentReader(rank, CPU)
    for seed in range(3):
        whole = split_weights(seed)
        weights = HostWeights.packed(whole, segments, 0)
        seen: list[ReadWeights] = []
        reader.read(order_for(weights, receipts), seen.append)
        reader.load(model, seen[0])
        reader.finish(model.finalize)
        segments.release(weights.segment)
        assert torch.equal(model.rows, whole["rows"][2 * rank : 2 * rank + 2])
        assert torch.equal(model.columns, whole["columns"][:, 3 * rank : 3 * rank + 3])
        assert torch.equal(model.norm, whole["norm"])
        assert reader.loaded_bytes == 4 * (12 + 12 + 6)
    rows, columns, norm = 0, 128, 256
    assert reader._part == [
        (rows + 48 * rank, rows + 48 * rank + 48),
        (columns + 12 * rank, columns + 84 + 12 * rank),
        (norm, norm + 24),
    ]


def test_only_copies_of_the_segment_into_real_tensors_are_noted() -> None:
    memory, other = torch.zeros(100), torch.zeros(10)
    with LoadRecord(memory[5:6]) as record:
        other.copy_(torch.ones(10))
        torch.empty(10, device="meta").copy_(memory[:10])
        memory[:0].clone()
        other.copy_(memory[20:30])
        memory[90:].clone()
        memory[50:52].to(torch.float64)
    assert record.ranges == [(80, 120), (360, 400), (200, 208)]
    assert record.num_bytes == 40 + 40 + 8


def test_on_a_gpu_the_pages_that_are_loaded_are_locked_from_the_second_version_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locked: list[Any] = []
    monkeypatch.setattr(
        "paceline.weights.hosts.segment.HostSegment.page_lock", lambda _, ranges: locked.append(list(ranges))
    )
    segments, receipts = SegmentPair(), Receipts(1)
    model, reader = Model(0), SegmentReader(0, torch.device("cuda"))
    for seed in range(2):
        weights = HostWeights.packed(split_weights(seed), segments, 0)
        seen: list[ReadWeights] = []
        reader.read(order_for(weights, receipts), seen.append)
        reader.load(model, seen[0])
        reader.finish(model.finalize)
        segments.release(weights.segment)
    assert locked == [[(0, 48), (128, 212), (256, 280)]]

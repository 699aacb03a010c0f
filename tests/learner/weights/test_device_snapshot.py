"""Comparison of shards on their device, here the CPU, finds exactly the difference of the two versions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from mixed_model import Mixed, train
from store_pair import BF16, Pair, check, offer
from torch import nn

from paceline.groups import Version
from paceline.learner.weights.device_snapshot import DeviceSnapshot, local_slices
from paceline.learner.weights.gather import plan_tensors
from paceline.weights.store.version_source import FoundChanges, VersionSource, WholeSlices

CHUNK_ELEMENTS = 20_000


def bits_by_chunk(model: nn.Module, source: DeviceSnapshot) -> list[np.ndarray]:
    flat = [part.bits for part in local_slices(model, BF16)]
    chunks = []
    for chunk in source.layout.chunks:
        rows = [
            flat[piece.block].reshape(source.layout.blocks[piece.block].rows, -1)[piece.first : piece.last]
            for piece in chunk
        ]
        chunks.append(np.concatenate([row.reshape(-1) for row in rows]))
    return chunks


def applied(base: list[np.ndarray], source: VersionSource) -> list[np.ndarray]:
    assert isinstance(source, FoundChanges)
    for chunk, found in source.chunks.items():
        np.testing.assert_array_equal(base[chunk][found.positions_K], found.changes.base_K)
        base[chunk][found.positions_K] = found.changes.new_K
    return base


def test_changes_are_those_of_the_version_before_also_when_that_was_not_written() -> None:
    model = Mixed()
    snapshot = DeviceSnapshot(model, BF16, CHUNK_ELEMENTS)
    assert isinstance(snapshot.take(), WholeSlices)
    start = bits_by_chunk(model, snapshot)
    train(model, 1)
    first = snapshot.take()
    after_first = bits_by_chunk(model, snapshot)
    for expected, found in zip(after_first, applied([b.copy() for b in start], first), strict=True):
        np.testing.assert_array_equal(found, expected)
    train(model, 2)
    second = snapshot.take(replaced=first)
    for expected, found in zip(bits_by_chunk(model, snapshot), applied(start, second), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert isinstance(snapshot.take(replaced=WholeSlices([])), WholeSlices)
    unchanged = snapshot.take()
    assert isinstance(unchanged, FoundChanges)
    assert not unchanged.chunks


def test_versions_compared_on_the_device_are_read_bit_for_bit(tmp_path: Path) -> None:
    pair = Pair(str(tmp_path / "store"), anchor_interval=4, chunk_elements=CHUNK_ELEMENTS, model=Mixed())
    try:
        snapshot = DeviceSnapshot(pair.model, BF16, CHUNK_ELEMENTS)
        reader = pair.reader()
        for step in range(7):
            train(pair.model, step)
            pair.writer.take(Version(1, step), snapshot.take, plan_tensors(pair.model, BF16))
            stored = pair.told(lambda stored, step=step: stored.version.step == step)
            check(reader.fetch(offer(pair, stored)), pair.expected())
        late = pair.reader()
        check(late.fetch(offer(pair, stored)), pair.expected())
    finally:
        pair.writer.close()


def test_a_model_on_a_cpu_is_compared_there_by_the_writer() -> None:
    assert not DeviceSnapshot(Mixed(), BF16).fits()

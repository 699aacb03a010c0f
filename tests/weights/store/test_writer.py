"""Versions written to a store by the learner's writer and read by the rollout worker's reader, damage included."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from store_pair import DEADLINE_S, Pair, check, offer

from paceline.errors import InvalidInput, NotFound
from paceline.groups import Version
from paceline.weights.store.object_store import WeightStore
from paceline.weights.store.reader import Damaged, StoreReader


@pytest.fixture
def make_pair(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(**options: Any) -> Pair:
        pairs.append(Pair(str(tmp_path / "store"), **options))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.writer.close()


def damage(pair: Pair, name: str, how: str) -> None:
    """Change an object as disks, networks and people do."""
    path = Path(pair.store.url) / name
    data = path.read_bytes()
    match how:
        case "flipped":
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        case "truncated":
            data = data[: len(data) * 2 // 3]
        case "removed":
            path.unlink()
            return
        case "swapped":
            data = (Path(pair.store.url) / "000001-00000001/delta.0.safetensors").read_bytes()
    path.write_bytes(data)


def test_a_chain_of_fifty_deltas_is_bit_identical(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    reader, late = pair.reader(), pair.reader()
    first = pair.step(0)
    assert first.version == first.snapshot_version == Version(1, 0)
    check(reader.fetch(offer(pair, first)), pair.expected())
    snapshot_bytes = reader.read_bytes
    for step in range(1, 51):
        newest = pair.step(step)
        assert newest.size_bytes < snapshot_bytes
        check(reader.fetch(offer(pair, newest)), pair.expected())
    check(late.fetch(offer(pair, newest)), pair.expected())


def test_a_version_in_which_nothing_changed_is_an_empty_delta(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    reader = pair.reader()
    reader.fetch(offer(pair, pair.step(0)))
    stored = pair.step(1, change=False)
    assert stored.size_bytes < 500
    check(reader.fetch(offer(pair, stored)), pair.expected())
    assert reader.held == Version(1, 1)


def test_a_snapshot_of_one_rank_is_a_model_file(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pair.step(0)
    path = Path(pair.store.url) / "000001-00000000/anchor.0.safetensors"
    with safe_open(path, framework="pt") as file:
        loaded = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    expected = pair.expected()
    assert loaded.keys() == expected.keys() - {"head", "empty"}
    for name, tensor in loaded.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)


def test_a_reader_that_missed_versions_catches_up_across_a_snapshot(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(anchor_interval=3)
    reader = pair.reader()
    reader.fetch(offer(pair, pair.step(0)))
    pair.held = Version(1, 0)
    for step in range(1, 5):
        newest = pair.step(step)
    assert newest.snapshot_version == Version(1, 3)
    before = reader.read_bytes
    check(reader.fetch(offer(pair, newest)), pair.expected())
    assert reader.read_bytes - before < newest.snapshot_bytes / 4


def test_snapshots_come_by_interval_by_cost_and_when_asked_for(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(anchor_interval=2)
    for step in range(3):
        # The delta is announced first, its snapshot as soon as it is there.
        assert pair.step(step).snapshot_version == Version(1, 0)
    assert pair.with_snapshot(2).version == Version(1, 2)
    pair.step(3)
    pair.writer.put_snapshot()
    assert pair.with_snapshot(3).version == Version(1, 3)


def test_a_snapshot_comes_when_the_deltas_outweigh_it(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pair.step(0)
    with torch.no_grad():
        pair.model.embedding.copy_(torch.randn(5000, 8).exp() * 1e3)
    first = pair.step(1, change=False)
    assert first.snapshot_version == Version(1, 0)
    with torch.no_grad():
        pair.model.embedding.copy_(torch.randn(5000, 8).exp() * 1e-3)
    pair.step(2, change=False)
    assert pair.with_snapshot(2).version == Version(1, 2)


@pytest.mark.parametrize("how", ["flipped", "truncated", "removed", "swapped"])
@pytest.mark.parametrize("name", ["delta.0.safetensors", "delta.json"])
def test_a_damaged_delta_is_refused_named_and_repaired_from_a_snapshot(
    make_pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture, how: str, name: str
) -> None:
    pair = make_pair()
    reader = pair.reader()
    reader.fetch(offer(pair, pair.step(0)))
    pair.step(1)
    pair.step(2)
    damage(pair, f"000001-00000002/{name}", how)
    stored = pair.step(3)
    with pytest.raises(Damaged, match="000001-00000002/" + name):
        reader.fetch(offer(pair, stored))
    assert f"000001-00000002/{name}" in caplog.text
    assert reader.held is None
    pair.writer.put_snapshot()
    repaired = pair.with_snapshot(3)
    check(reader.fetch(offer(pair, repaired)), pair.expected())
    check(reader.fetch(offer(pair, pair.step(4))), pair.expected())


@pytest.mark.parametrize("how", ["flipped", "truncated", "removed"])
@pytest.mark.parametrize("name", ["anchor.0.safetensors", "anchor.json"])
def test_a_damaged_snapshot_is_refused_and_written_again(make_pair: Callable[..., Pair], how: str, name: str) -> None:
    pair = make_pair()
    pair.step(0)
    stored = pair.step(1)
    damage(pair, f"000001-00000000/{name}", how)
    reader = pair.reader()
    with pytest.raises(Damaged, match=name):
        reader.fetch(offer(pair, stored))
    pair.writer.put_snapshot()
    check(reader.fetch(offer(pair, pair.with_snapshot(1))), pair.expected())


def test_a_delta_for_another_base_falls_back_to_the_snapshot(
    make_pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    pair = make_pair()
    reader = pair.reader()
    tensors = reader.fetch(offer(pair, pair.step(0)))
    assert reader._held is not None
    reader._held.checksums[0][-1] = "0" * 16
    tensors["norm"].zero_()
    check(reader.fetch(offer(pair, pair.step(1))), pair.expected())
    assert "another base" in caplog.text


def test_a_copy_that_went_bad_in_memory_is_found_and_replaced(
    make_pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    pair = make_pair()
    reader = pair.reader()
    tensors = reader.fetch(offer(pair, pair.step(0)))
    tensors["embedding"][0, 0] += 1.0
    check(reader.fetch(offer(pair, pair.step(1))), pair.expected())
    assert "'embedding'" in caplog.text


def test_a_store_that_cannot_be_read_is_not_called_damaged(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    pair = make_pair()
    stored = pair.step(0)
    with pytest.raises(NotFound, match=r"elsewhere has no 000001-00000000/anchor\.json"):
        StoreReader(WeightStore(str(tmp_path / "elsewhere")), "run").fetch(offer(pair, stored))
    with pytest.raises(InvalidInput, match="cannot be used"):
        WeightStore("nosuch://bucket/path")


def test_a_manifest_of_another_run_is_refused(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    stored = pair.step(0)
    with pytest.raises(Exception, match=r"is of .* but the offer is of"):
        StoreReader(pair.store, "other").fetch(dataclasses.replace(offer(pair, stored), run_id="other"))


def test_only_what_no_member_needs_is_pruned(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(anchor_interval=2)
    pair.step(0)
    pair.held = Version(1, 1)
    for step in range(1, 9):
        pair.step(step)
    pair.writer.close()
    kept = sorted({name.partition("/")[0] for name in pair.store.names()})
    assert kept == [f"000001-{step:08d}" for step in range(1, 9)]  # the member continues from version 1
    later = make_pair(session=2)
    later.step(9)
    later.step(10)
    assert {name.partition("/")[0][:6] for name in later.store.names()} == {"000002"}


def test_pruning_keeps_two_chains_when_everybody_is_up_to_date(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(anchor_interval=2)
    for step in range(9):
        pair.held = pair.step(step).version
    pair.writer.close()
    snapshots = [name for name in pair.store.names() if name.endswith("anchor.json")]
    assert len(snapshots) <= 3
    assert "000001-00000000/anchor.json" not in snapshots


def test_versions_that_no_rank_has_begun_are_overtaken(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    reader = pair.reader()
    reader.fetch(offer(pair, pair.step(0)))
    write, entered, go_on = pair.store.write, queue.Queue[str](), queue.Queue[None]()

    def slow(name: str, chunks: Any) -> None:
        entered.put(name)
        go_on.get(timeout=DEADLINE_S)
        write(name, chunks)

    pair.store.write = slow  # type: ignore[method-assign]
    pair.put(Version(1, 1))
    assert "00000001" in entered.get(timeout=DEADLINE_S)
    for step in range(2, 6):
        with torch.no_grad():
            pair.model.norm += 1.0
        pair.put(Version(1, step))
    for _ in range(4):
        go_on.put(None)
    assert pair.stored.get(timeout=DEADLINE_S).version == Version(1, 1)
    newest = pair.stored.get(timeout=DEADLINE_S)
    assert newest.version == Version(1, 5)
    check(reader.fetch(offer(pair, newest)), pair.expected())


def test_a_store_that_fails_is_tried_again(make_pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture) -> None:
    pair = make_pair()
    folder = Path(pair.store.url)
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file where the store should be")
    pair.put(Version(1, 0))
    while "cannot be stored" not in caplog.text:
        assert pair.stored.empty()
    folder.unlink()
    stored = pair.stored.get(timeout=DEADLINE_S)
    check(pair.reader().fetch(offer(pair, stored)), pair.expected())

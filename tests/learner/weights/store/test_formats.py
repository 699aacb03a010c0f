"""The format of the version before: a session goes on in it when a member reads no other, and readers read both."""

from __future__ import annotations

import json
import queue
from pathlib import Path

import pytest
import torch
from mixed_model import Mixed, train
from store_pair import DEADLINE_S, Pair, check, offer

from learner.weights.publish_result import PublishResult
from learner.weights.store.offers import StoreOffers
from paceline.groups import Version
from paceline.weights.offers import StoreOffer
from paceline.weights.part_file import read_head
from paceline.weights.store_format import NEWEST_FORMAT, StoredVersion


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(str(tmp_path / "store"), chunk_elements=20_000, model=Mixed())


def formats(pair: Pair, step: int, kind: str) -> tuple[int, int]:
    """The formats of a manifest and of its part."""
    folder = Path(pair.store.url) / f"000001-{step:08d}"
    manifest = json.loads((folder / f"{kind}.json").read_bytes())["format"]
    part = (folder / f"{kind}.0.safetensors").read_bytes()
    return manifest, read_head(part, len(part)).header.format


def step(pair: Pair, number: int) -> StoreOffer:
    train(pair.model, number)
    return offer(pair, pair.step(number, change=False))


def test_a_session_goes_on_in_the_older_format(pair: Pair) -> None:
    try:
        reader, late = pair.reader(), pair.reader()
        check(reader.fetch(step(pair, 0)), pair.expected())
        check(reader.fetch(step(pair, 1)), pair.expected())
        assert formats(pair, 1, "delta") == (3, 3)
        pair.writer.put_snapshot(older_format=True)
        check(reader.fetch(offer(pair, pair.with_snapshot(1))), pair.expected())
        assert formats(pair, 1, "anchor") == (2, 2)
        for number in range(2, 5):
            check(reader.fetch(step(pair, number)), pair.expected())
            assert formats(pair, number, "delta") == (2, 2)
        before = late.read_bytes
        check(late.fetch(step(pair, 5)), pair.expected())
        assert late.read_bytes > before
        manifest = json.loads((Path(pair.store.url) / "000001-00000005/delta.json").read_bytes())
        assert "heads" not in manifest
    finally:
        pair.writer.close()


def test_slices_of_the_format_before_are_what_it_was(pair: Pair) -> None:
    """Field for field what a reader of the version before parses."""
    try:
        pair.writer.put_snapshot(older_format=True)
        step(pair, 0)
        folder = Path(pair.store.url) / "000001-00000000"
        data = (folder / "anchor.0.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        document = json.loads(data[8 : 8 + length])
        header = json.loads(document["__metadata__"]["paceline"])
        assert set(header) == {"kind", "run_id", "version", "base", "rank", "algorithm", "slices", "format"}
        assert [(name, start, length) for name, start, length, _ in header["slices"]] == [
            ("mask", 0, 9),
            ("embedding", 0, 50_000),
            ("small", 0, 3_000),
            ("scalar", 0, 1),
            ("counter", 0, 5),
        ]
        manifest = json.loads((folder / "anchor.json").read_bytes())
        assert set(manifest) == {
            *("kind", "run_id", "version", "algorithm", "parts", "contents", "tensors"),
            *("base_version", "base", "base_contents", "format"),
        }
        assert StoredVersion.from_bytes((folder / "anchor.json").read_bytes()).format == 2
    finally:
        pair.writer.close()


def test_a_member_of_the_version_before_is_noticed_once() -> None:
    sent: queue.Queue[StoreOffer] = queue.Queue()
    results: queue.Queue[PublishResult] = queue.Queue()
    offers = StoreOffers(
        run_id="run", url="/", algorithm="xxh3_64", max_wait_s=5, send=sent.put, on_result=results.put
    )
    try:
        offers.set_members(1, ["old", "new"])
        offers.note_format("new", NEWEST_FORMAT)
        offers.note_format("unknown", 0)
        assert not offers.wants_snapshot
        offers.note_format("old", 0)
        assert offers.wants_snapshot
        assert offers.needs_older_format
        offers.snapshot_ordered()
        offers.note_format("old", 0)
        assert not offers.wants_snapshot
    finally:
        offers.close()


def test_everything_waits_in_one_queue_in_order(pair: Pair) -> None:
    """A switch of formats while a version waits to be written loses neither."""
    try:
        torch.manual_seed(0)
        step(pair, 0)
        train(pair.model, 1)
        pair.put(Version(1, 1))
        pair.writer.put_snapshot(older_format=True)
        stored = pair.with_snapshot(1)
        check(pair.reader().fetch(offer(pair, stored)), pair.expected())
        assert pair.stored.empty() or pair.stored.get(timeout=DEADLINE_S) is not None
    finally:
        pair.writer.close()

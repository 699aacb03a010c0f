"""The format of stored versions: elements of every width, and the refusal of other formats."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from mixed_model import Mixed, train
from store_pair import DEADLINE_S, Pair, check, offer

from paceline.errors import WireError
from paceline.groups import Version
from paceline.weights.store.store_format import (
    METADATA_KEY,
    PREFIX_BYTES,
    StoredVersion,
    StoreOffer,
    read_head,
)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(str(tmp_path / "store"), chunk_elements=20_000, model=Mixed())


def step(pair: Pair, number: int) -> StoreOffer:
    train(pair.model, number)
    return offer(pair, pair.step(number, change=False))


def document_of(part: bytes) -> dict[str, dict[str, str]]:
    (length,) = struct.unpack_from("<Q", part)
    document: dict[str, dict[str, str]] = json.loads(part[PREFIX_BYTES : PREFIX_BYTES + length])
    return document


def test_elements_of_every_width_travel_in_several_chunks(pair: Pair) -> None:
    try:
        reader, late = pair.reader(), pair.reader()
        for number in range(4):
            check(reader.fetch(step(pair, number)), pair.expected())
        check(late.fetch(step(pair, 4)), pair.expected())
    finally:
        pair.writer.close()


def test_fields_are_those_of_format_3_and_another_one_is_refused(pair: Pair) -> None:
    try:
        step(pair, 0)
        step(pair, 1)
        for kind in ("anchor", "delta"):
            folder = Path(pair.store.url) / f"000001-{kind == 'delta':08d}"
            stored = (folder / f"{kind}.json").read_bytes()
            manifest = json.loads(stored)
            assert manifest["format"] == 3
            assert set(manifest) == {
                *("kind", "run_id", "version", "algorithm", "parts", "contents", "tensors"),
                *("base_version", "base", "base_contents", "heads", "format"),
            }
            assert StoredVersion.from_bytes(stored).to_bytes() == stored
            with pytest.raises(WireError, match="format 2, but this Paceline reads 3"):
                StoredVersion.from_bytes(json.dumps(manifest | {"format": 2}).encode())
            part = (folder / f"{kind}.0.safetensors").read_bytes()
            document = document_of(part)
            header = json.loads(document["__metadata__"][METADATA_KEY])
            assert header["format"] == 3
            assert set(header) == {
                *("format", "kind", "run_id", "version", "base", "rank", "algorithm"),
                *("notes", "blocks", "chunk_elements"),
            }
            document["__metadata__"][METADATA_KEY] = json.dumps(header | {"format": 4})
            head = json.dumps(document).encode()
            with pytest.raises(WireError, match="format 4, but this Paceline reads 3"):
                read_head(struct.pack("<Q", len(head)) + head, len(part) + len(head))
    finally:
        pair.writer.close()


def test_a_snapshot_that_is_wanted_while_a_version_waits_loses_neither(pair: Pair) -> None:
    try:
        step(pair, 0)
        train(pair.model, 1)
        pair.put(Version(1, 1))
        pair.writer.put_snapshot()
        stored = pair.with_snapshot(1)
        check(pair.reader().fetch(offer(pair, stored)), pair.expected())
        assert pair.stored.empty() or pair.stored.get(timeout=DEADLINE_S) is not None
    finally:
        pair.writer.close()

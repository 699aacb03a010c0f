"""The manifest of a version: read back unchanged, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from host_relays import content, layout

from paceline.errors import WireError
from paceline.groups import Version
from paceline.weights.hosts.manifest import HostManifest, piece_digest

V1 = Version(1, 2)


def described(hosts: int = 2) -> HostManifest:
    base = layout(hosts=hosts, bucket_bytes=2048)
    memory = memoryview(content(V1, base.layout.total_bytes))
    return base.of(V1, tuple(piece_digest(memory, piece, base.algorithm) for piece in base.pieces))


def test_it_is_read_as_it_was_written() -> None:
    manifest = described()
    found = HostManifest.from_bytes(manifest.to_bytes())
    assert found == manifest
    assert found.pieces == manifest.pieces
    assert found.sources == 2
    assert found.size_bytes == sum(piece.size_bytes for piece in manifest.pieces)


def test_the_digest_of_a_piece_depends_on_each_of_its_bytes() -> None:
    manifest = described()
    data = bytearray(content(V1, manifest.layout.total_bytes))
    piece = next(piece for piece in manifest.pieces if len(piece.ranges) > 1)
    before = piece_digest(memoryview(data), piece, "sha256")
    data[piece.ranges[-1][1] - 1] ^= 1
    assert piece_digest(memoryview(data), piece, "sha256") != before


def changed(**fields: Any) -> bytes:
    return json.dumps(json.loads(described().to_bytes()) | fields).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",
        b"[]",
        b"{}",
        changed(format=2),
        changed(algorithm="md5"),
        changed(digests=["00" * 16]),
        changed(digests=["zz"]),
        changed(owned=[[0, 1, 0]]),
        changed(owned=[[-1, 4000, 0]]),
        changed(version=[1]),
        changed(layout="{}"),
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        HostManifest.from_bytes(data)

"""Comparison of checksums and numbers: once over every byte, shared by threads and processes."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from flat_tensors import pack

from paceline.errors import InvalidInput, WireError
from paceline.weights.format.manifest import WeightManifest
from paceline.weights.format.packing import checksums, plan
from paceline.weights.format.verification import pieces_of, share_of, verify


def version(tensors: dict[str, torch.Tensor], bucket_bytes: int = 64) -> tuple[WeightManifest, torch.Tensor]:
    layout = plan(tensors, bucket_bytes)
    flat = pack(tensors, layout)
    return layout.with_checksums(checksums(flat, layout)), flat


def tied() -> dict[str, torch.Tensor]:
    shared = torch.arange(40.0)
    return {"a": torch.ones(100), "b": shared, "tied": shared, "none": torch.empty(0), "c": torch.ones(7)}


def compare(flat: torch.Tensor, manifest: WeightManifest, digests: bool = True, **limits: int) -> int:
    return verify(flat, manifest, pieces_of(manifest), digests=digests, **limits)


def end_of(manifest: WeightManifest, name: str) -> int:
    return next(entry.offset + entry.num_bytes for entry in manifest.entries if entry.name == name)


@pytest.mark.parametrize("threads", [1, 3, 50])
def test_every_byte_is_compared(threads: int) -> None:
    manifest, flat = version(tied())
    assert compare(flat, manifest, num_threads=threads) == 4 * (100 + 40 + 7)
    for name in ("a", "b", "c"):
        wrong = flat.clone()
        wrong[end_of(manifest, name) - 1] += 1
        with pytest.raises(WireError, match=f"tensor {name!r} arrived with xxh3_64"):
            compare(wrong, manifest, num_threads=threads)


def test_pieces_larger_than_a_chunk_are_hashed_in_chunks() -> None:
    manifest, flat = version({"a": torch.randn(777), "b": torch.randn(333).to(torch.bfloat16)}, 64)
    compare(flat, manifest, chunk_bytes=100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 500, 999])
def test_a_number_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype, bad: float, place: int) -> None:
    tensor = torch.linspace(-1, 1, 1000).to(dtype)
    tensor[place] = bad
    manifest, flat = version({"fine": torch.ones(3), "weight": tensor}, bucket_bytes=101)
    message = "weight 'weight' has NaN or infinite elements; the old weights stay"
    for digests in (True, False):
        with pytest.raises(InvalidInput, match=message):
            compare(flat, manifest, digests, chunk_bytes=136)


def test_a_sum_that_overflows_is_no_fault() -> None:
    manifest, flat = version({"weight": torch.full((1000,), 60_000.0).to(torch.float16)})
    compare(flat, manifest)


def test_bytes_of_integers_are_never_a_fault() -> None:
    manifest, flat = version({"weight": torch.full((100,), -1, dtype=torch.int16)})
    compare(flat, manifest)


def test_wrong_bytes_that_look_like_nan_are_wrong_bytes() -> None:
    manifest, flat = version({"weight": torch.ones(100)})
    flat[:8] = 255
    with pytest.raises(WireError, match="'weight' arrived with"):
        compare(flat, manifest)


def test_without_digests_only_numbers_are_looked_at() -> None:
    manifest, flat = version({"weight": torch.ones(100)})
    flat[2] += 1
    compare(flat, manifest, digests=False)


def test_names_of_one_memory_with_two_checksums_are_refused() -> None:
    manifest, _ = version(tied())
    entries = [e._replace(checksum="0") if e.name == "tied" else e for e in manifest.entries]
    with pytest.raises(WireError, match="'b' and 'tied' share their bytes but have the checksums"):
        pieces_of(replace(manifest, entries=tuple(entries)))


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shares_are_even_and_hold_every_piece_once(count: int) -> None:
    sizes = [1000, 10, 10, 500, 490, 300, 300, 300, 7, 0]
    manifest, _ = version({f"t{i}": torch.zeros(size, dtype=torch.uint8) for i, size in enumerate(sizes)})
    pieces = pieces_of(manifest)
    shares = [share_of(pieces, index, count) for index in range(count)]
    assert sorted(piece for share in shares for piece in share) == pieces
    num_bytes = [sum(piece.end - piece.start for piece in share) for share in shares]
    assert max(num_bytes) - min(num_bytes) <= 1000


def test_a_process_compares_its_share_alone() -> None:
    manifest, flat = version({f"t{i}": torch.full((64,), float(i)) for i in range(4)})
    shares = [share_of(pieces_of(manifest), index, 2) for index in range(2)]
    wrong = flat.clone()
    wrong[shares[1][0].start] += 1
    assert verify(wrong, manifest, shares[0], digests=True) == 512
    with pytest.raises(WireError):
        verify(wrong, manifest, shares[1], digests=True)


def test_no_thread_is_left_behind() -> None:
    manifest, flat = version(tied())
    flat[0] += 1
    with pytest.raises(WireError):
        compare(flat, manifest)
    assert not [t for t in threading.enumerate() if t.name.startswith("paceline-checksums")]

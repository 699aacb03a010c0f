"""The offsets of a version's bytes, and the conditions on a foreign manifest."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from flat_tensors import pack

from paceline.errors import WireError
from paceline.weights.format.manifest import TensorPlan, WeightManifest, checksum
from paceline.weights.format.packing import check_fits, checksums, plan, views


def tensors() -> dict[str, torch.Tensor]:
    shared = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    return {
        "embed": shared,
        "wide": torch.arange(40, dtype=torch.float32),
        "none": torch.empty(0, 4),
        "scale": torch.tensor(7, dtype=torch.int64),
        "head": shared,
    }


def summed() -> tuple[WeightManifest, torch.Tensor]:
    manifest = plan(tensors(), bucket_bytes=100)
    flat = pack(tensors(), manifest)
    return manifest.with_checksums(checksums(flat, manifest)), flat


def test_tensors_are_aligned_and_tied_ones_share() -> None:
    manifest = plan(tensors(), bucket_bytes=100)
    # 12 bytes at 0; 160 at 64, ending at 224; nothing at 256; 8 at 256; head where embed is
    assert [(e.name, e.offset, e.num_bytes) for e in manifest.entries] == [
        ("embed", 0, 12),
        ("wide", 64, 160),
        ("none", 256, 0),
        ("scale", 256, 8),
        ("head", 0, 12),
    ]
    assert manifest.total_bytes == 264


def test_equal_tensors_that_are_not_tied_do_not_share() -> None:
    manifest = plan({"a": torch.zeros(4), "b": torch.zeros(4)}, bucket_bytes=100)
    assert [entry.offset for entry in manifest.entries] == [0, 64]


def test_packed_tensors_come_back_as_views() -> None:
    manifest, flat = summed()
    arrived = views(flat, manifest)
    for name, tensor in tensors().items():
        assert torch.equal(arrived[name], tensor)
        assert arrived[name].dtype == tensor.dtype
    assert arrived["head"].data_ptr() == arrived["embed"].data_ptr() == flat.data_ptr()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d | {"bucket_bytes": 1, "total_bytes": 2**40, "tensors": [["a", "uint8", [2**40], 0, ""]]},
            "buckets of 1",
        ),
        (lambda d: d | {"tensors": [["a", "uint8", [1] * 17, 0, ""]]}, "more than 16 dimensions"),
        (lambda d: d | {"tensors": [["a", "uint8", "11", 0, ""]]}, "more than 16 dimensions"),
        (lambda d: d | {"tensors": [["a", "uint8", [-1], 0, ""]]}, "-1 is not a count"),
        (lambda d: d | {"tensors": [["a", "uint8", [float("nan")], 0, ""]]}, "nan is not a count"),
        (lambda d: d | {"tensors": [["a", "uint8", [True], 0, ""]]}, "True is not a count"),
        (lambda d: d | {"tensors": [["a", "uint8", [2**62, 2**62], 0, ""]]}, "puts tensor 'a' of .* at byte 0"),
        (lambda d: d | {"tensors": [["a", ["uint8"], [1], 0, ""]]}, "unhashable"),
        (lambda d: d | {"bucket_bytes": 0}, "buckets of 0"),
        (lambda d: d | {"total_bytes": 2**63}, "is not a count"),
    ],
)
def test_sizes_that_cannot_be_are_refused_before_memory_is_set_aside(
    change: Callable[[dict[str, Any]], dict[str, Any]], message: str
) -> None:
    document = change(json.loads(summed()[0].to_bytes()))
    with pytest.raises(WireError, match=message):
        WeightManifest.from_bytes(json.dumps(document).encode())


def test_a_manifest_of_any_depth_and_length_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WireError, match="cannot be read"):
        WeightManifest.from_bytes(b"[" * 1_000_000)
    monkeypatch.setattr("paceline.weights.format.manifest.MAX_MANIFEST_BYTES", 10)
    with pytest.raises(WireError, match="more than 10"):
        WeightManifest.from_bytes(summed()[0].to_bytes())


def test_a_version_larger_than_the_hosts_memory_is_refused() -> None:
    check_fits(1)
    with pytest.raises(WireError, match="this host has"):
        check_fits(2**60)


def test_sha256_is_the_sum_where_it_is_asked_for() -> None:
    manifest = plan({"a": torch.tensor([1, 2], dtype=torch.uint8)}, bucket_bytes=100)
    manifest = replace(manifest, algorithm="sha256")
    flat = pack({"a": torch.tensor([1, 2], dtype=torch.uint8)}, manifest)
    assert checksums(flat, manifest) == {"a": hashlib.sha256(b"\x01\x02").hexdigest()}
    assert checksum(b"\x01\x02", "sha256") == hashlib.sha256(b"\x01\x02").hexdigest()
    assert len(checksum(b"\x01\x02", "xxh3_64")) == 16


def test_manifest_survives_the_wire() -> None:
    manifest, _ = summed()
    assert WeightManifest.from_bytes(manifest.to_bytes()) == manifest


def test_layout_hash_ignores_content_and_buckets_but_not_names() -> None:
    manifest, flat = summed()
    flat[0] ^= 1
    changed = manifest.with_checksums(checksums(flat, manifest))
    assert changed.layout_hash == manifest.layout_hash
    assert changed.content_hash != manifest.content_hash
    assert plan(tensors(), bucket_bytes=7).layout_hash == manifest.layout_hash
    renamed = {("other" if name == "wide" else name): tensor for name, tensor in tensors().items()}
    assert plan(renamed, bucket_bytes=100).layout_hash != manifest.layout_hash


def set_offset(document: dict[str, Any]) -> None:
    document["tensors"][1][3] = 1 << 40


def set_total(document: dict[str, Any]) -> None:
    document["total_bytes"] = 1 << 40


def set_name(document: dict[str, Any]) -> None:
    document["tensors"][1][0] = "renamed"


def set_dtype(document: dict[str, Any]) -> None:
    document["tensors"][1][1] = "object"


def set_shape(document: dict[str, Any]) -> None:
    document["tensors"][1][2] = [-1]


def set_format(document: dict[str, Any]) -> None:
    document["format"] = 9


def set_bucket(document: dict[str, Any]) -> None:
    document["bucket_bytes"] = 0


def repeat_tensor(document: dict[str, Any]) -> None:
    document["tensors"].append(document["tensors"][0])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (set_offset, "puts tensor 'wide' of"),
        (set_total, "asks for 1099511627776 bytes, but its tensors need"),
        (set_name, "layout hash"),
        (set_dtype, "cannot be read"),
        (set_shape, "cannot be read"),
        (set_format, "has format 9"),
        (set_bucket, "buckets of 0 bytes"),
        (repeat_tensor, "names a tensor twice"),
    ],
)
def test_damaged_manifests_are_refused(damage: Callable[[dict[str, Any]], None], message: str) -> None:
    document = json.loads(summed()[0].to_bytes())
    damage(document)
    with pytest.raises(WireError, match=message):
        WeightManifest.from_bytes(json.dumps(document).encode())


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b"{}", b"7"])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="cannot be read"):
        WeightManifest.from_bytes(data)


def test_what_cannot_travel_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="tensor 'c' is complex64"):
        plan({"c": torch.zeros(2, dtype=torch.complex64)}, bucket_bytes=100)
    with pytest.raises(ValueError, match="'b' cannot share the bytes of 'a'"):
        WeightManifest.plan([TensorPlan("a", "int8", (2,)), TensorPlan("b", "int8", (3,), "a")], 100)
    with pytest.raises(ValueError, match="bucket_bytes is 0"):
        WeightManifest.plan([], 0)


def test_the_shared_modules_do_not_import_torch() -> None:
    program = (
        "import sys, paceline.weights.format.manifest, paceline.weights.format.packing; print('torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30.0)
    assert said.stdout.strip() == "False"

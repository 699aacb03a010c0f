"""Manifests: equal files give equal texts, and no path leaves the folder."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.bundle.manifest import BundledFile, Manifest
from paceline.errors import InvalidInput

SHA = "ab" * 32


def file(path: str, kind: Any = "code", size: int = 1, sha256: str = SHA) -> BundledFile:
    return BundledFile(path, kind, size, sha256)


def test_text_does_not_depend_on_the_order_and_reads_back() -> None:
    one = Manifest.of([file("folder/b.py"), file("data/folder/a.jsonl", "data")])
    other = Manifest.of([file("data/folder/a.jsonl", "data"), file("folder/b.py")])
    assert one.digest == other.digest
    assert Manifest.read(one.text) == one
    assert [f.path for f in one.subset("code").files] == ["folder/b.py"]
    assert one.has("data/folder", "data")
    assert not one.has("data/fold", "data")


@pytest.mark.parametrize(
    "path", ["../a.py", "/etc/passwd", "a/../../b", "a//b", "a/./b", "", "a\\b", "a\nb", "x" * 1025]
)
def test_paths_that_leave_the_folder_are_refused(path: str) -> None:
    with pytest.raises(InvalidInput, match=r"path|leaves"):
        Manifest.of([file(path)])


def test_files_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(InvalidInput, match="same path twice"):
        Manifest.of([file("a"), file("a", size=2)])
    with pytest.raises(InvalidInput, match="below another"):
        Manifest.of([file("a"), file("a/b")])
    with pytest.raises(InvalidInput, match="SHA-256"):
        Manifest.of([file("a", sha256="AB" * 32)])
    with pytest.raises(InvalidInput, match="size -1"):
        Manifest.of([file("a", size=-1)])


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        json.dumps({"format": 2, "files": []}).encode(),
        json.dumps({"format": 1, "files": [["a", "code", 1]]}).encode(),
        json.dumps({"format": 1, "files": [["a", "secret", 1, SHA]]}).encode(),
        json.dumps({"format": 1, "files": [["a", "code", True, SHA]]}).encode(),
        json.dumps({"format": 1, "files": []}, indent=1).encode(),
        b" " * (9 << 20),
    ],
)
def test_hostile_texts_are_refused(text: bytes) -> None:
    with pytest.raises(InvalidInput, match="bundle's manifest"):
        Manifest.read(text)

"""The cache of unpacked bundles: verified, bounded, and safe between processes."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.bundle.cache import KIND, BundleCache
from paceline.bundle.manifest import BundledFile, Manifest
from paceline.data.rows import open_rows
from paceline.encryption.encrypted_file import decrypt, encrypt
from paceline.encryption.storage_key import KEY_VARIABLE, StorageKey
from paceline.errors import InvalidInput, Unavailable, Unreadable
from paceline.files.bounded_cache import BoundedCache
from paceline.files.line_file import LineWriter


class Source:
    """Files by digest that count how often they are fetched."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.fetched: list[str] = []

    def manifest(self, **files: bytes) -> Manifest:
        entries = []
        for name, data in files.items():
            sha256 = hashlib.sha256(data).hexdigest()
            self.content[sha256] = data
            entries.append(BundledFile(f"folder/{name}", "code", len(data), sha256))
        return Manifest.of(entries)

    def __call__(self, file: BundledFile) -> Iterable[bytes]:
        self.fetched.append(file.path)
        data = self.content[file.sha256]
        yield data[:3]
        yield data[3:]


def cache_in(folder: Path, max_bytes: int) -> BundleCache:
    return BundleCache(BoundedCache(folder, max_bytes, KIND))


@pytest.fixture
def source() -> Source:
    return Source()


def test_files_are_fetched_once_and_checked_each_time(tmp_path: Path, source: Source) -> None:
    cache, manifest = cache_in(tmp_path, 1000), source.manifest(a=b"abcdef", b=b"")
    with cache.open(manifest, source) as one, cache.open(manifest, source) as other:
        assert one.root == other.root
        assert (one.root / "folder/a").read_bytes() == b"abcdef"
    assert source.fetched == ["folder/a", "folder/b"]
    (one.root / "folder/a").unlink()
    (one.root / "folder/a").write_bytes(b"abcxyz")
    with cache.open(manifest, source) as again:
        assert (again.root / "folder/a").read_bytes() == b"abcdef"
    (again.root / "folder/b").unlink()
    (again.root / "folder/b").symlink_to("/dev/null")
    with cache.open(manifest, source) as again:
        assert not (again.root / "folder/b").is_symlink()


@pytest.mark.parametrize("data", [b"abcdeX", b"abc", b"abcdefg"])
def test_content_without_its_digest_is_refused_and_leaves_nothing(tmp_path: Path, source: Source, data: bytes) -> None:
    manifest = source.manifest(a=b"abcdef")
    source.content[manifest.files[0].sha256] = data
    with pytest.raises(Unreadable, match=r"'folder/a' of the run's bundle arrived with"):
        cache_in(tmp_path, 1000).open(manifest, source)
    assert {path.suffix for path in tmp_path.iterdir()} == {".lock", ".filling"}


def test_the_bundle_of_longest_ago_is_removed_first(tmp_path: Path, source: Source) -> None:
    cache = cache_in(tmp_path, 250)
    one, two, three = (source.manifest(a=bytes([number]) * 100) for number in range(3))
    for time_s, manifest in ((100, one), (50, two)):
        cache.open(manifest, source).close()
        os.utime(tmp_path / f"{manifest.digest}.lock", (time_s, time_s))
    with cache.open(three, source):
        assert (tmp_path / one.digest).is_dir()
        assert not (tmp_path / two.digest).exists()


def test_bundles_in_use_stay(tmp_path: Path, source: Source) -> None:
    cache = cache_in(tmp_path, 250)
    one, two, three = (source.manifest(a=bytes([number]) * 100) for number in range(3))
    with cache.open(one, source) as first, cache.open(two, source):
        with pytest.raises(Unavailable, match=KIND.size_variable):
            cache.open(three, source)
        assert first.root.is_dir()
    cache.open(three, source).close()
    with pytest.raises(Unreadable, match="may hold 0 MB"):
        cache.open(source.manifest(a=b"x" * 251), source)


def test_a_bundle_is_unpacked_by_one_and_used_by_all(tmp_path: Path, source: Source) -> None:
    cache, manifest = cache_in(tmp_path, 1000), source.manifest(a=b"abcdef")
    roots: list[Path] = []

    def open_it() -> None:
        with cache.open(manifest, source) as unpacked:
            roots.append(unpacked.root)

    threads = [threading.Thread(target=open_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(roots) == 8
    assert source.fetched == ["folder/a"]


def test_the_environment_names_folder_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Source) -> None:
    monkeypatch.setenv(KIND.folder_variable, str(tmp_path / "here"))
    with BundleCache.of_user().open(source.manifest(a=b"abc"), source) as unpacked:
        assert unpacked.root.parent == tmp_path / "here"
    monkeypatch.setenv(KIND.size_variable, "much")
    with pytest.raises(InvalidInput, match=r"PACELINE_BUNDLE_CACHE_MB is 'much'"):
        BundleCache.of_user()
    monkeypatch.setenv(KIND.size_variable, "1")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(KIND.folder_variable, str(tmp_path / "file"))
    with pytest.raises(Unreadable, match="set PACELINE_BUNDLE_CACHE to a folder"):
        BundleCache.of_user().open(source.manifest(a=b"abc"), source)


def test_data_is_encrypted_with_a_key_and_code_is_plain(
    tmp_path: Path, source: Source, given_key: StorageKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, rows = b"def reward(): ...", b'{"prompt": "planted"}'
    of_code = source.manifest(code=code).files[0]
    of_data = replace(source.manifest(rows=rows).files[0], kind="data")
    manifest = Manifest.of([of_code, of_data])
    cache = cache_in(tmp_path, 1000)
    with cache.open(manifest, source) as held:
        assert (held.root / "folder/code").read_bytes() == code
        assert decrypt((held.root / "folder/rows").read_bytes(), given_key, "rows") == rows
    fetched = len(source.fetched)
    with cache.open(manifest, source):
        assert len(source.fetched) == fetched
    monkeypatch.setenv(KEY_VARIABLE, os.urandom(32).hex())  # the entry of another key is made anew
    with cache.open(manifest, source) as held:
        assert b"planted" not in (held.root / "folder/rows").read_bytes()
    monkeypatch.delenv(KEY_VARIABLE)
    with cache.open(manifest, source) as held:
        assert (held.root / "folder/rows").read_bytes() == rows
    monkeypatch.setenv(KEY_VARIABLE, os.urandom(32).hex())  # a plain file of earlier does not stay
    with cache.open(manifest, source) as held:
        assert b"planted" not in (held.root / "folder/rows").read_bytes()


def test_data_that_was_encrypted_before_it_was_sent_is_read_through_both(
    tmp_path: Path, source: Source, given_key: StorageKey
) -> None:
    row = {"prompt": "planted"}
    lines = LineWriter(tmp_path / "lines", given_key)
    lines.write(json.dumps(row).encode() + b"\n")
    lines.close()
    whole = encrypt(json.dumps(row).encode() + b"\n", given_key)
    files = source.manifest(**{"lines.jsonl": (tmp_path / "lines").read_bytes(), "whole.jsonl": whole}).files
    manifest = Manifest.of([replace(file, kind="data") for file in files])
    with cache_in(tmp_path / "cache", 10_000).open(manifest, source) as held:
        for file in manifest.files:
            assert open_rows(str(held.root / file.path), "train")[0] == row
    fetched = len(source.fetched)
    cache_in(tmp_path / "cache", 10_000).open(manifest, source).close()
    assert len(source.fetched) == fetched

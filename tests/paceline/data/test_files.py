"""The files of a data set's name: globs, URLs, and their copies."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from paceline.data.files import files_of, names_files
from paceline.errors import SpecError, Unreadable


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_DATA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_glob_is_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_text("{}\n")
    assert [path.name for path in files_of(f"{tmp_path}/*.jsonl", "data.train")] == ["a.jsonl", "b.jsonl"]
    assert names_files("data/*.parquet")
    assert names_files("s3://bucket/data")
    assert not names_files("openai/gsm8k")
    with pytest.raises(Unreadable, match=r"data\.train: no file matches '.*x\*\.jsonl'"):
        list(files_of(f"{tmp_path}/x*.jsonl", "data.train"))
    with pytest.raises(Unreadable, match=r"data\.train: no file '.*none\.csv'; check the path"):
        list(files_of(f"{tmp_path}/none.csv", "data.train"))


def test_stored_files_are_copied_once_for_each_version(cache: Path) -> None:
    store = fsspec.filesystem("memory")
    store.pipe("/files/b.jsonl", b"b")
    store.pipe("/files/a.jsonl", b"a")
    first = list(files_of("memory://files/*.jsonl", "data.train"))
    assert [(path.name, path.read_bytes()) for path in first] == [("a.jsonl", b"a"), ("b.jsonl", b"b")]
    assert all(cache in path.parents for path in first)
    assert list(files_of("memory://files/a.jsonl", "data.train")) == first[:1]
    store.pipe("/files/a.jsonl", b"other")
    (changed,) = list(files_of("memory://files/a.jsonl", "data.train"))
    assert changed.read_bytes() == b"other"
    assert first[0].read_bytes() == b"a"


def test_what_is_not_there_or_unknown_is_told_with_the_field(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match=r"data\.validation: no file at 'memory://files/none\.jsonl'"):
        list(files_of("memory://files/none.jsonl", "data.validation"))
    with pytest.raises(SpecError, match=r"data\.train 'nosuch://a/b\.jsonl' cannot be used"):
        list(files_of("nosuch://a/b.jsonl", "data.train"))
    (tmp_path / "a.jsonl").write_text("{}")
    assert list(files_of(f"file://{tmp_path}/a.jsonl", "data.train")) == [tmp_path / "a.jsonl"]

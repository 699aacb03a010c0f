"""The files of a data set's name: globs, URLs, and their copies."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from uuid import uuid4

import fsspec
import pyarrow as pa
import pytest
from pyarrow import feather, ipc, parquet

from paceline.data.rows import files_of, names_files, open_rows
from paceline.encryption.encrypted_file import WrongKey, is_encrypted
from paceline.encryption.storage_key import KEY_VARIABLE, StorageKey
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


ROWS = [{"prompt": f"planted {index}", "answer": str(index)} for index in range(7)]


def contents(kind: str) -> bytes:
    """Return ROWS as a file of a kind."""
    match kind:
        case "jsonl":
            return b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
        case "json":
            return json.dumps(ROWS).encode()
        case "csv":
            return ("prompt,answer\n" + "".join(f"{row['prompt']},x{row['answer']}\n" for row in ROWS)).encode()
    table, buffer = pa.Table.from_pylist(ROWS), io.BytesIO()
    match kind:
        case "parquet":
            parquet.write_table(table, buffer)
        case "feather":
            feather.write_feather(table, buffer)
        case _:
            with ipc.new_stream(buffer, table.schema) as writer:
                writer.write_table(table)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow", "feather"])
def test_copies_of_every_kind_are_encrypted_with_a_key_and_read_by_row(
    cache: Path, kind: str, given_key: StorageKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    name = f"/{uuid4().hex}/rows.{kind}"
    fsspec.filesystem("memory").pipe(name, contents(kind))
    rows = open_rows(f"memory:/{name}", "train")
    assert [rows[index]["prompt"] for index in (6, 0, 3)] == ["planted 6", "planted 0", "planted 3"]
    assert len(rows) == 7
    (copy,) = cache.rglob(f"rows.{kind}")
    assert is_encrypted(copy.read_bytes())
    assert not any(b"planted" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(Unreadable, match="part of a cache, which no run may name"):
        open_rows(str(copy), "train")
    with pytest.raises(WrongKey, match="no key is given"):
        open_rows(str(shutil.copy(copy, tmp_path)), "train")


def test_rows_and_their_fingerprint_are_the_same_with_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("jsonl", "json", "csv"):
        path = tmp_path / f"rows.{kind}"
        path.write_bytes(contents(kind))
        plain = open_rows(str(path), "train")
        monkeypatch.setenv(KEY_VARIABLE, "ab" * 32)
        other = open_rows(str(path), "train")
        monkeypatch.delenv(KEY_VARIABLE)
        assert [other[index] for index in range(7)] == [plain[index] for index in range(7)]
        assert (other.fingerprint, other.columns) == (plain.fingerprint, plain.columns)

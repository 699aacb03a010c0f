"""Several files as one data set."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from paceline.data.prompts import open_prompts
from paceline.data.rows import open_rows
from paceline.errors import DataError
from paceline.spec import DataSection
from paceline.spec.reading import parse_spec


def test_files_of_all_kinds_are_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DATA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "b.jsonl").write_text('{"prompt": "p0", "n": 0}\n{"prompt": "p1", "n": 1}\n')
    (tmp_path / "a.csv").write_text("n,prompt\n2,p2\n")
    fsspec.filesystem("memory").pipe("/joined/c.jsonl", b'{"prompt": "p3", "n": 3}\n')
    names = (f"{tmp_path}/b.jsonl", f"{tmp_path}/*.csv", "memory://joined/*.jsonl")
    source = open_prompts(DataSection(train=names, shuffle=False), seed=0)
    assert len(source) == 4
    assert [source.draw(cursor) for cursor in range(4)] == [(f"p{n}", {"n": n}) for n in range(4)]
    assert source.fingerprint.count("rows") == 3


def test_a_file_that_lacks_a_column_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "p", "answer": "1"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "p"}\n')
    with pytest.raises(DataError, match=r"b\.jsonl: no column 'answer', which .*a\.jsonl has"):
        open_rows(f"{tmp_path}/*.jsonl", "train")
    (tmp_path / "c.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"data\.train: '.*c\.jsonl' has no rows"):
        open_rows((f"{tmp_path}/a.jsonl", f"{tmp_path}/c.jsonl"), "train")


def test_relative_globs_and_lists_start_at_the_specs_folder(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    tree = {
        "policy": {"model_name": "m"},
        "data": {"train": ["a.jsonl", "hub/name"], "validation": "*.jsonl"},
        "rewards": [{"function": "exact_match"}],
    }
    data = parse_spec(tree, base=tmp_path).data
    assert data.train == (f"{tmp_path.resolve()}/a.jsonl", "hub/name")
    assert data.validation == f"{tmp_path.resolve()}/*.jsonl"

"""Files that appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.files.whole_file import write_whole, written_whole


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_replaces_the_one_before_and_leaves_nothing_beside_it(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file.json"
    for text in ("first", "zweites, länger"):
        write_whole(path, text, durable=durable)
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def fail_half_way(path: Path) -> None:
    with written_whole(path) as partial:
        assert not partial.exists()
        partial.write_bytes(b"half")
        raise OSError("disk full")


def test_a_writer_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"before")
    (tmp_path / "file.partial").write_bytes(b"of a process that was killed")
    with pytest.raises(OSError, match="disk full"):
        fail_half_way(path)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]

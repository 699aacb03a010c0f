"""Stamps of files change with a file's content, not with other files in the folder."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.files.whole_file import stamp


def test_a_file_that_is_changed_or_added_changes_the_stamp(tmp_path: Path) -> None:
    code = tmp_path / "r.py"
    code.write_text("a")
    before = stamp(tmp_path, ["*.py"])
    (tmp_path / "train.jsonl").write_text("{}")
    assert stamp(tmp_path, ["*.py"]) == before
    code.write_text("ab")
    assert stamp(tmp_path, ["*.py"]) != before
    os.utime(code, ns=(1, 1))
    touched = stamp(tmp_path, ["*.py"])
    (tmp_path / "helper.py").touch()
    assert len({before, touched, stamp(tmp_path, ["*.py"])}) == 3


def test_a_folder_that_is_not_there_has_an_empty_stamp(tmp_path: Path) -> None:
    assert stamp(tmp_path / "away", ["*"]) == ()

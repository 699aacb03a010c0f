"""The directory of runs: made, or refused with a message."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.errors import Unreadable
from paceline.services.common.options import make_directory


def test_it_is_made_with_those_above_it(tmp_path: Path) -> None:
    make_directory(tmp_path / "a" / "b")
    make_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_file_in_its_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "runs", Path("/proc/x")):
        with pytest.raises(Unreadable, match=f"^--directory {directory} cannot be made: .+; name a folder"):
            make_directory(directory)


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write anywhere")
def test_a_folder_of_others_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(Unreadable, match="you cannot write in it"):
        make_directory(tmp_path)

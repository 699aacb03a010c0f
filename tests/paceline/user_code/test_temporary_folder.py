"""Folders for temporary files of user code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from paceline.user_code.surroundings import TEMPORARY_PREFIX, TemporaryFolder, remove_left_over

KILLED = """
import os, signal, sys, pathlib
from paceline.user_code.surroundings import TemporaryFolder
folder = TemporaryFolder(pathlib.Path(sys.argv[1]))
deep = pathlib.Path(folder.path, "a", "b")
deep.mkdir(parents=True)
deep.joinpath("c").write_text("what user code left")
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_folder_goes_with_its_files(tmp_path: Path) -> None:
    folder = TemporaryFolder(tmp_path)
    Path(folder.path, "file").write_text("x")
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_service_that_was_killed_is_removed_and_no_other(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], stdout=-1, text=True)
    assert killed.returncode == -signal.SIGKILL
    left = Path(killed.stdout.strip())
    assert left.joinpath("a", "b", "c").exists()
    living = TemporaryFolder(tmp_path)
    other = tmp_path / "another"
    other.mkdir()
    link = tmp_path / f"{TEMPORARY_PREFIX}link"
    link.symlink_to(other)
    assert remove_left_over(tmp_path, min_age_s=3600.0) == 0, "a young one may be about to be locked"
    assert remove_left_over(tmp_path, min_age_s=-1.0) == 1
    assert sorted(tmp_path.iterdir()) == sorted([Path(living.path), other, link])
    living.remove()
    assert not os.path.exists(living.path)


def test_there_may_be_no_such_folder(tmp_path: Path) -> None:
    assert remove_left_over(tmp_path / "nowhere") == 0

"""The folder of a program: what it measures, and that it goes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.reward.sandbox.workspace import ENTRY_BYTES, Workspace

MOST = 1 << 40


def test_files_are_written_and_everything_goes() -> None:
    with Workspace({"a.py": b"1", "deep/er/b": b"2"}) as workspace:
        top = Path(workspace.path)
        assert (top / "a.py").read_bytes() == b"1"
        assert (top / "deep/er/b").read_bytes() == b"2"
    assert not top.exists()


def test_files_and_entries_count() -> None:
    with Workspace({"big": bytes(10_000_000)}) as workspace:
        assert 10_000_000 <= workspace.used_bytes(MOST, []) < 11_000_000
        for number in range(100):
            Path(workspace.path, f"empty{number}").touch()
        assert workspace.used_bytes(MOST, []) >= 10_000_000 + 100 * ENTRY_BYTES


def test_open_files_without_a_name_count() -> None:
    with Workspace({}) as workspace:
        path = Path(workspace.path, "hidden")
        with open(path, "wb", buffering=0) as file:
            file.write(bytes(5_000_000))
            path.unlink()
            assert workspace.used_bytes(MOST, []) < 1_000_000
            assert workspace.used_bytes(MOST, [os.getpid()]) >= 5_000_000


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(bytes(5_000_000))
    with Workspace({}) as workspace:
        os.symlink(tmp_path, Path(workspace.path, "door"))
        assert workspace.used_bytes(MOST, []) <= 2 * ENTRY_BYTES
    assert (tmp_path / "precious").stat().st_size == 5_000_000


def test_deeper_folders_than_are_measured_count_as_too_much() -> None:
    with Workspace({}) as workspace:
        folder = Path(workspace.path)
        for _ in range(60):
            folder = folder / "d"
            folder.mkdir()
        assert workspace.used_bytes(MOST, []) > MOST


def test_a_tree_deeper_than_a_path_can_be_goes() -> None:
    workspace = Workspace({})
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(workspace.path)
        for number in range(1500):
            os.mkdir("folder-with-a-name")
            if number % 500 == 0:
                Path("file").write_bytes(b"x")
            os.chdir("folder-with-a-name")
    finally:
        os.fchdir(before)
        os.close(before)
    workspace.remove()
    assert not os.path.exists(workspace.path)


@pytest.mark.parametrize("mode", [0o000, 0o500, 0o300])
def test_a_folder_that_its_owner_may_not_enter_goes(mode: int) -> None:
    workspace = Workspace({"shut/inner/file": b"x"})
    os.chmod(os.path.join(workspace.path, "shut", "inner"), mode)
    os.chmod(os.path.join(workspace.path, "shut"), mode)
    workspace.remove()
    assert not os.path.exists(workspace.path)

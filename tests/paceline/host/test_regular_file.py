"""Regular files are read, others refused at once."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from paceline.host.regular_file import read_regular


def test_a_file_and_a_link_to_it_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "file") == read_regular(tmp_path / "link") == b"content"


def test_other_kinds_of_files_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    faults = {
        "pipe": "not a file",
        "device": "not a file",
        "loop": "symbolic links",
        "folder": "Is a directory",
        "none": "No such file",
    }
    for name, fault in faults.items():
        with pytest.raises(OSError, match=fault):
            read_regular(tmp_path / name)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError, match="No such device or address"):
            read_regular(tmp_path / "socket")

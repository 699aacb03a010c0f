"""Direct appends write all parts to the file, in order, whatever the system does with each write."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from paceline.services.coordinator.ledger import segments as segment_writer
from paceline.services.coordinator.ledger.segments import BLOCK_BYTES, BUFFER_BYTES, SegmentWriter

SIZES = (1, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 7, BUFFER_BYTES, 2 * BUFFER_BYTES + 5)


def append_all(writer: SegmentWriter) -> list[tuple[int, bytes]]:
    """Append parts of many sizes, two at a time; return their expected positions."""
    expected = []
    for size in SIZES:
        parts = [os.urandom(size), b"tail of %d" % size]
        start = writer.size
        assert start % BLOCK_BYTES == 0
        writer.append([parts[0], memoryview(parts[1])])
        expected.append((start, b"".join(parts)))
    writer.close()
    return expected


def check(path: Path, expected: list[tuple[int, bytes]]) -> None:
    content = path.read_bytes()
    assert len(content) % BLOCK_BYTES == 0
    for start, part in expected:
        assert content[start : start + len(part)] == part


def test_parts_of_any_size_come_back(tmp_path: Path) -> None:
    check(tmp_path / "segment", append_all(SegmentWriter(tmp_path / "segment")))


def test_a_write_that_the_system_cuts_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, cuts = os.pwrite, [BLOCK_BYTES, 2 * BLOCK_BYTES + 100, BLOCK_BYTES + 1]

    def cut_short(fd: int, content: memoryview, offset: int) -> int:
        limit = cuts.pop() if cuts else len(content)
        whole = min(limit, len(content)) // BLOCK_BYTES * BLOCK_BYTES
        return min(limit, write(fd, content[:whole], offset) + limit % BLOCK_BYTES)

    monkeypatch.setattr(segment_writer.os, "pwrite", cut_short)
    check(tmp_path / "segment", append_all(SegmentWriter(tmp_path / "segment")))
    assert not cuts


def test_a_file_system_without_such_writes_gets_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, refused = os.pwrite, []

    def refuse_direct(fd: int, content: memoryview, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & segment_writer.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(fd, content, offset)

    monkeypatch.setattr(segment_writer.os, "pwrite", refuse_direct)
    writer = SegmentWriter(tmp_path / "segment")
    if not fcntl.fcntl(writer._fd, fcntl.F_GETFL) & segment_writer.O_DIRECT:
        pytest.skip("this file system has no direct writes")
    check(tmp_path / "segment", append_all(writer))
    assert refused == [0]


def test_a_write_that_gets_nowhere_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_writer.os, "pwrite", lambda fd, content, offset: 100)
    writer = SegmentWriter(tmp_path / "segment")
    with pytest.raises(OSError, match="No space left on device"):
        writer.append([b"x" * 200])
    writer.close()

"""Lines of a file, plain and encrypted: appended, read by position, refused if they were moved."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline.encryption.encrypted_file import WrongKey, encrypting
from paceline.encryption.storage_key import StorageKey
from paceline.files.line_file import HEADER_BYTES, LineReader, LineWriter, stored_size

KEY = StorageKey(bytes(range(32)))
LINES = [json.dumps({"text": f"prompt {index} " * index}).encode() + b"\n" for index in range(20)]


def write(path: Path, lines: list[bytes], key: StorageKey | None) -> list[int]:
    writer = LineWriter(path, key)
    try:
        return [writer.write(line) for line in lines]
    finally:
        writer.close()


def read(path: Path, key: StorageKey | None) -> list[bytes]:
    with LineReader(path, key) as reader:
        return [line for _, _, line in reader]


@pytest.mark.parametrize("key", [None, KEY])
def test_lines_are_read_in_order_and_by_position(tmp_path: Path, key: StorageKey | None) -> None:
    path = tmp_path / "lines"
    offsets = write(path, LINES[:12], key) + write(path, LINES[12:], key)
    with LineReader(path, key) as reader:
        places = [(start, end) for start, end, _ in reader]
        assert [start for start, _ in places] == offsets
        assert [reader.read(start, end) for start, end in places] == LINES
        assert [reader.read_at(offset) for offset in reversed(offsets)] == LINES[::-1]
    assert [end - start for start, end in places] == [stored_size(len(line), key) for line in LINES]
    assert path.stat().st_size == sum(stored_size(len(line), key) for line in LINES) + (HEADER_BYTES if key else 0)
    assert (b"prompt" in path.read_bytes()) == (key is None)


def test_without_a_key_the_file_is_the_lines(tmp_path: Path) -> None:
    write(tmp_path / "lines", LINES, None)
    assert (tmp_path / "lines").read_bytes() == b"".join(LINES)


def test_a_file_that_is_encrypted_as_a_whole_is_read_by_lines(tmp_path: Path, given_key: StorageKey) -> None:
    with encrypting(tmp_path / "lines", given_key) as file:
        file.write(b"".join(LINES))
    with LineReader(tmp_path / "lines", given_key) as reader:
        places = [(start, end) for start, end, _ in reader]
        assert [reader.read(start, end) for start, end in places] == LINES


def test_plain_lines_of_earlier_are_encrypted_first(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    write(path, LINES[:3], None)
    write(path, LINES[3:], KEY)
    assert read(path, KEY) == LINES
    assert b"prompt" not in path.read_bytes()
    assert [each.name for each in tmp_path.iterdir()] == ["lines"]


def test_half_a_line_of_a_killed_process_costs_that_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    write(path, LINES[:2], KEY)
    os.truncate(path, path.stat().st_size - 5)
    write(path, LINES[2:4], KEY)
    with LineReader(path, KEY) as reader:
        stored = list(reader.stored())
        assert reader.opened(stored[0][2], stored[0][0]) == LINES[0]
        with pytest.raises(WrongKey, match=f"the line at byte {stored[1][0]} is damaged"):
            reader.opened(stored[1][2], stored[1][0])
        assert [reader.opened(line, start) for start, _, line in stored[2:]] == LINES[2:4]


def test_lines_that_changed_places_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    write(path, [b"one\n", b"two\n"], KEY)
    header, one, two = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(header + two + one)
    with pytest.raises(WrongKey, match="damaged, cut off or moved"):
        read(path, KEY)


@pytest.mark.parametrize("use", [read, lambda path, key: write(path, [b"x\n"], key)])
def test_another_key_and_no_key_are_refused_with_the_names(tmp_path: Path, use: object) -> None:
    path, other = tmp_path / "lines", StorageKey(os.urandom(32))
    write(path, LINES, KEY)
    before = path.read_bytes()
    with pytest.raises(
        WrongKey, match=f"lines is encrypted with the key {KEY.name.hex()}, not with {other.name.hex()}"
    ):
        use(path, other)  # type: ignore[operator]
    with pytest.raises(WrongKey, match="no key is given; give the key with which the file was written"):
        use(path, None)  # type: ignore[operator]
    assert path.read_bytes() == before
    path.write_bytes(before[:60])
    with pytest.raises(WrongKey, match="is damaged"):
        use(path, KEY)  # type: ignore[operator]

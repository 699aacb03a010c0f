"""Records: lines with their own hash, each of which names the hash before."""

from __future__ import annotations

import hashlib
import json

import pytest

from paceline.services.coordinator.audit_log.records import MAX_LINE_BYTES, Entry, chained, read_line

ENTRY = Entry("paceline.v1.RunService/Cancel", who="ann", roles=("submitter",), subject="sums-1")


def test_a_line_is_json_whose_hash_is_over_the_rest_of_it() -> None:
    line, digest = chained(7, 1_000_000_000.25, ENTRY, "ab")
    assert json.loads(line) == {
        "sequence": 7,
        "time": "2001-09-09T01:46:40.250000+00:00",
        "what": "paceline.v1.RunService/Cancel",
        "result": "OK",
        "who": "ann",
        "roles": ["submitter"],
        "subject": "sums-1",
        "previous": "ab",
        "hash": digest,
    }
    rest = line.replace(f',"hash":"{digest}"'.encode(), b"").rstrip(b"\n")
    assert hashlib.sha256(rest).hexdigest() == digest
    record = read_line(line.rstrip(b"\n"))
    assert (record.sequence, record.previous, record.hash) == (7, "ab", digest)


def test_the_hash_before_changes_the_hash() -> None:
    assert chained(7, 1.0, ENTRY, "ab")[1] != chained(7, 1.0, ENTRY, "ac")[1]


def test_a_line_with_any_changed_byte_is_refused() -> None:
    line = chained(7, 1.0, ENTRY, "ab")[0].rstrip(b"\n")
    for index in range(len(line)):
        changed = bytearray(line)
        changed[index] ^= 1
        with pytest.raises(ValueError, match=r"the line is not a record|the hash of|the record lacks|delimiter|JSON"):
            read_line(bytes(changed))
    for cut in (b"", b"{}", line[:-1], line[1:]):
        with pytest.raises(ValueError, match=r"the line is not a record|the hash of|the record lacks|delimiter|JSON"):
            read_line(cut)


def test_texts_are_bounded_and_one_line_whatever_they_contain() -> None:
    hostile = "\n\u2028\x1b[31m" + "ä\U0001f600" * 10_000
    line, _ = chained(1, 1.0, Entry(*[hostile] * 3, ("viewer",), *[hostile] * 5), "")
    assert line.isascii()
    assert line.count(b"\n") == 1
    assert len(line) < MAX_LINE_BYTES
    assert read_line(line.rstrip(b"\n")).fields["who"].startswith("\n\u2028\x1b")

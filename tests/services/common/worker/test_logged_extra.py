"""Further columns of reward functions: bounded on the wire, refused if they do not fit, joined to samples by their
text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.encryption.encrypted_file import WrongKey
from paceline.encryption.storage_key import KEY_VARIABLE, StorageKey
from paceline.files.line_file import LineWriter
from paceline.services.common.worker.score_extras import (
    EXTRA_NAME,
    MAX_BYTES,
    extra_json,
    extra_line,
    read_extra,
)


def test_columns_come_back_by_the_digest_of_their_text(tmp_path: Path) -> None:
    text = extra_json({"answer": ["4", None], "steps": [1, 2.5]})
    older = extra_line(7, "aa", extra_json({"answer": ["3", "3"]}), 2)
    (tmp_path / EXTRA_NAME).write_text(f'{older}not JSON\n[]\n{{"digest": "aa"}}\n' + extra_line(7, "aa", text, 2))
    assert read_extra(tmp_path, {"aa"}) == {"aa": {"answer": ["4", None], "steps": [1, 2.5]}}
    assert read_extra(tmp_path, {"bb"}) == {}
    assert read_extra(tmp_path / "elsewhere", {"aa"}) == {}


def test_too_much_loses_the_last_columns() -> None:
    columns = {"short": ["a"], "long": ["b" * MAX_BYTES]}
    assert json.loads(extra_json(columns)) == {"short": ["a"]}
    assert extra_json({"long": ["b" * MAX_BYTES]}) == extra_json({}) == ""


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"a": 1}', '{"a": [1]}', '{"a": "ab"}', "[" * 100_000, " " * (MAX_BYTES + 1)]
)
def test_what_is_no_columns_of_the_group_is_left_out(text: str) -> None:
    assert extra_line(7, "aa", text, 2) == ""


def test_encrypted_columns_come_back_with_the_key(
    tmp_path: Path, given_key: StorageKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = LineWriter(tmp_path / EXTRA_NAME, given_key)
    writer.write(extra_line(7, "aa", extra_json({"answer": ["planted"]}), 1).encode())
    writer.close()
    assert b"planted" not in (tmp_path / EXTRA_NAME).read_bytes()
    assert read_extra(tmp_path, {"aa"}) == {"aa": {"answer": ["planted"]}}
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(WrongKey, match="no key is given"):
        read_extra(tmp_path, {"aa"})

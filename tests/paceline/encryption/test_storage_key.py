"""The key comes from one variable, derives a key for each purpose, and is never shown."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from paceline.encryption.storage_key import FILE_VARIABLE, KEY_VARIABLE, StorageKey, storage_key
from paceline.errors import InvalidInput

TEXT = "ab" * 32


def test_without_a_variable_there_is_no_key() -> None:
    assert storage_key({}) is None


def test_a_file_and_a_variable_give_the_same_key(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{TEXT.upper()}\n")
    by_file, by_variable = storage_key({FILE_VARIABLE: str(file)}), storage_key({KEY_VARIABLE: TEXT})
    assert by_file is not None
    assert by_variable is not None
    assert by_file.name == by_variable.name
    assert by_file.derive("file", b"1") == by_variable.derive("file", b"1")


def test_purposes_and_salts_have_different_keys() -> None:
    key = StorageKey(os.urandom(32))
    assert len({key.derive(purpose, salt) for purpose in ("a", "b") for salt in (b"", b"1", b"2")}) == 6


def test_the_key_does_not_show_itself() -> None:
    key = StorageKey(bytes.fromhex(TEXT))
    assert "abab" not in repr(key)
    assert bytes.fromhex(TEXT)[:8] != key.name


@pytest.mark.parametrize("text", ["ab" * 31, "ab" * 33, "xy" * 32, "password"])
def test_a_text_that_is_no_key_is_refused_without_being_shown(text: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    for variables in ({KEY_VARIABLE: text}, {FILE_VARIABLE: str(file)}):
        with pytest.raises(InvalidInput, match="64 hexadecimal digits") as refused:
            storage_key(variables)
        assert text not in str(refused.value)
        assert next(iter(variables)) in str(refused.value)


def test_a_missing_file_and_two_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=re.escape(f"{str(tmp_path / 'none')!r} cannot be read")):
        storage_key({FILE_VARIABLE: str(tmp_path / "none")})
    with pytest.raises(InvalidInput, match="both set"):
        storage_key({FILE_VARIABLE: "x", KEY_VARIABLE: TEXT})

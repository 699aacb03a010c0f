"""Keys of the dashboard: the rights of a token, a link and a wrong key."""

from pathlib import Path

import pytest

from paceline.services.common.access.page_keys import Access, Role


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("a" * 64 + "\n")
    return path


def test_the_token_and_the_keys_have_their_roles(token_file: Path) -> None:
    access = Access(token_file)
    operator, reader = access.key(Role.OPERATOR), access.key(Role.READER)
    assert operator != reader
    assert access.role("Bearer " + "a" * 64) is Role.OPERATOR
    assert access.role(f"Bearer {operator}") is Role.OPERATOR
    assert access.role(f"Bearer {reader}") is Role.READER
    for wrong in ("", "Bearer ", f"Bearer {operator[:-1]}", "Bearer ü", "Basic YTph"):
        assert access.role(wrong) is Role.NOBODY


def test_keys_outlive_the_process_and_not_the_token(token_file: Path) -> None:
    key = Access(token_file).key(Role.READER)
    assert Access(token_file).role(f"Bearer {key}") is Role.READER
    token_file.write_text("b" * 64)
    assert Access(token_file).role(f"Bearer {key}") is Role.NOBODY


def test_read_only_makes_everyone_a_reader(token_file: Path) -> None:
    access = Access(token_file, read_only=True)
    assert access.role("Bearer " + "a" * 64) is Role.READER


def test_without_a_token_the_keys_are_of_one_process(tmp_path: Path) -> None:
    access = Access(tmp_path / "none")
    assert access.role("Bearer ") is Role.NOBODY
    assert access.role(f"Bearer {access.key(Role.READER)}") is Role.READER
    assert Access(tmp_path / "none").role(f"Bearer {access.key(Role.READER)}") is Role.NOBODY

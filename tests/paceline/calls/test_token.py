"""The token's file, and the comparison of tokens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.calls.token import is_same, known_token, make_token, metadata, read_token, token_path
from paceline.encryption.storage_key import FILE_VARIABLE, storage_key
from paceline.errors import InvalidInput
from paceline.services.cli.main import main
from paceline.tls.folder import TlsFolder


def test_a_token_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "token"
    token = make_token(path)
    assert len(bytes.fromhex(token)) == 32
    assert make_token(path) == token == read_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["token"]
    assert make_token(tmp_path / "other") != token


def test_a_file_without_a_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("\n")
    with pytest.raises(InvalidInput, match="is empty or unreadable; delete it"):
        make_token(tmp_path / "token")
    assert read_token(tmp_path / "none") == ""
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    assert read_token(tmp_path / "token") == ""


def test_what_is_no_file_or_a_large_one_has_no_token(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_text("a" * (1 << 20))
    for path in (tmp_path / "pipe", tmp_path / "large", tmp_path, Path("/dev/zero")):
        assert read_token(path) == ""
    os.mkfifo(tmp_path / "ca.crt")
    with pytest.raises(InvalidInput, match=r"ca\.crt cannot be read: the path is a pipe"):
        TlsFolder(tmp_path).read()
    storage_key_file = str(tmp_path / "pipe")
    with pytest.raises(InvalidInput, match="cannot be read"):
        storage_key({FILE_VARIABLE: storage_key_file})


def test_only_the_whole_token_is_right() -> None:
    ((key, value),) = metadata("abc")
    assert key == "authorization"
    assert value == "Bearer abc"
    assert is_same("abc", "abc")
    for other in ("", "ab", "abcd", "Abc", "äbc"):
        assert not is_same(other, "abc")
    assert metadata("") == ()
    assert not is_same("", "")  # no token is not an empty one


def test_the_variable_goes_before_the_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_TOKEN_FILE", str(tmp_path / "elsewhere"))
    assert token_path(tmp_path / "token") == tmp_path / "elsewhere"
    monkeypatch.delenv("PACELINE_TOKEN_FILE")
    assert token_path(tmp_path / "token") == tmp_path / "token"
    assert token_path() == Path("runs/token")


@pytest.mark.parametrize("port", ["0", "65536", "99999999999", "x", "-1"])
def test_an_impossible_port_is_refused(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    monkeypatch.setenv("PACELINE_COORDINATOR_PORT", port)
    with pytest.raises(InvalidInput, match="has no port from 1 to 65535"):
        known_token("127.0.0.1:7070")


@pytest.mark.parametrize("command", ["submit x", "runs", "watch x", "members", "generate x", "up"])
def test_every_command_that_speaks_to_a_coordinator_takes_a_token_file(command: str) -> None:
    shown = CliRunner().invoke(main, [*command.split()[:1], "--help"])
    assert "--token-file" in shown.output

"""A ledger opens only with its key, and refusals name that key; without a key the library is not imported."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from command_line import paceline
from ledger_files import KEY_TEXT, OTHER_KEY_TEXT

from paceline.encryption.encrypted_file import WrongKey
from paceline.encryption.storage_key import FILE_VARIABLE, KEY_VARIABLE, StorageKey
from paceline.errors import InvalidInput
from paceline.services.coordinator.audit.repair import repair
from paceline.services.coordinator.ledger import database
from paceline.services.coordinator.ledger.backup import back_up
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.main import main as coordinator

KEY = StorageKey(bytes.fromhex(KEY_TEXT))
OTHER = StorageKey(bytes.fromhex(OTHER_KEY_TEXT))


@pytest.fixture
def encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ledger encrypted with KEY, which is no longer in the environment."""
    path = tmp_path / "ledger.sqlite"
    with monkeypatch.context() as patch:
        patch.setenv(KEY_VARIABLE, KEY_TEXT)
        with contextlib.closing(Ledger(path)) as ledger, ledger.transaction():
            ledger.add_run("a-1", "name: a", "a-1")
    return path


@pytest.mark.parametrize("given", [None, OTHER_KEY_TEXT])
def test_another_key_and_none_are_refused_and_change_nothing(
    encrypted: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    before = encrypted.read_bytes()
    said = f"{encrypted} is encrypted with the key {KEY.name.hex()}, "
    said += "and no key is given" if given is None else f"not with {OTHER.name.hex()}"
    said += f"; give the key with which the file was written, by {FILE_VARIABLE} or {KEY_VARIABLE}"
    if given is not None:
        monkeypatch.setenv(KEY_VARIABLE, given)
    for read_only in (False, True):
        with pytest.raises(WrongKey) as refused:
            Ledger(encrypted, read_only=read_only)
        assert str(refused.value).endswith(said)
    with pytest.raises(WrongKey):
        repair(encrypted, lambda line: None)
    folder = encrypted.parent
    for command in (
        ["ledger", "verify", "a-1"],
        ["ledger", "verify", "--repair"],
        ["ledger", "backup", f"{folder}/copy.sqlite"],
        ["samples", "a-1", "--step", "0"],
        ["up"],
    ):
        result = paceline(*command, "--directory", folder)
        assert result.exit_code == 1, command
        assert isinstance(result.exception, SystemExit), result.exception
        assert said in " ".join(result.output.split()), command
    result = CliRunner().invoke(coordinator, ["--directory", str(folder), "--port", "0"])
    assert result.exit_code == 1
    assert said in result.output
    assert encrypted.read_bytes() == before
    assert not (folder / "copy.sqlite").exists()
    monkeypatch.setenv(KEY_VARIABLE, KEY_TEXT)
    with contextlib.closing(Ledger(encrypted)) as ledger:  # no process has its lock
        assert [row["run_id"] for row in ledger.runs()] == ["a-1"]


def test_a_plain_ledger_is_refused_while_a_key_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    monkeypatch.setenv(KEY_VARIABLE, KEY_TEXT)
    for read_only in (False, True):
        with pytest.raises(
            WrongKey, match=rf"is not encrypted.*`paceline ledger encrypt --directory {tmp_path}`, or unset"
        ):
            Ledger(path, read_only=read_only)


def test_a_backup_shows_its_key_wherever_it_is(encrypted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY_TEXT)
    copy = encrypted.with_name("copy.sqlite")
    with contextlib.closing(Ledger(encrypted, read_only=True)) as ledger:
        back_up(ledger, copy)
    assert copy.read_bytes()[:16] == database.MAGIC + KEY.name
    with contextlib.closing(Ledger(copy)) as ledger:
        assert ledger.was_restored
    monkeypatch.setenv(KEY_VARIABLE, OTHER_KEY_TEXT)
    with pytest.raises(WrongKey, match=f"encrypted with the key {KEY.name.hex()}"):
        Ledger(copy)


def test_a_missing_library_is_one_sentence_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sqlcipher3", None)
    monkeypatch.delitem(sys.modules, "paceline.services.coordinator.ledger.cipher_connection", raising=False)
    monkeypatch.delattr("paceline.services.coordinator.ledger.cipher_connection", raising=False)
    with pytest.raises(InvalidInput, match=r"pip install 'paceline\[encryption\]'"):
        database.connect(tmp_path / "file", KEY)


def test_without_a_key_the_library_is_not_imported(tmp_path: Path) -> None:
    text = (
        "import sys; from pathlib import Path; from paceline.services.coordinator.ledger.ledger import Ledger;"
        "Ledger(Path(sys.argv[1])).close(); Ledger(Path(sys.argv[1]), read_only=True).close();"
        "print([name for name in sys.modules if name.startswith('sqlcipher3')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", text, tmp_path / "ledger.sqlite"], check=True, capture_output=True, text=True
    )
    assert result.stdout == "[]\n"
    assert database.is_plain(tmp_path / "ledger.sqlite")


def test_paths_with_the_characters_of_addresses_are_opened(tmp_path: Path) -> None:
    folder = tmp_path / "a?b=c#d %20e"
    folder.mkdir()
    for key in (None, KEY):
        path = folder / f"file {key}"
        with contextlib.closing(database.connect(path, key)) as db:
            db.execute("CREATE TABLE t (x)")
        assert path.stat().st_size > 0

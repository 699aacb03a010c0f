"""The folder of a version is made and verified without the rest of Paceline; test_fetch.py tampers with it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.apps.registry.folder import Contents, Sources, make_folder, verify_folder
from paceline.apps.registry.statement import Lineage, make_key
from paceline.errors import Conflict, DataError, InvalidInput, NotFound
from paceline.files.names import CARD
from paceline.files.storage import Folder


def made(folder: Path, sources: Sources, into: str = "made") -> Contents:
    (folder / into).mkdir()
    return make_folder(folder / into, sources, "sums", 1, Lineage(), "", folder / "key.pem")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_key(tmp_path / "key.pem")
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text("{}")
    (tmp_path / "export" / CARD).write_text("its own card")
    return tmp_path


def test_a_folder_that_was_moved_is_verified(folder: Path) -> None:
    contents = made(folder, Sources(Folder(folder / "export")))
    (folder / "made").rename(folder / "elsewhere")
    found = verify_folder(folder / "elsewhere", folder / "key.pem.pub")
    assert found == contents
    assert "its own card" in (folder / "elsewhere" / CARD).read_text()
    assert set(found.statement["predicate"]["export"]["files"]) == {"config.json", CARD}


def test_keys_are_never_overwritten(folder: Path) -> None:
    assert (folder / "key.pem").stat().st_mode & 0o077 == 0
    with pytest.raises(Conflict, match="never overwritten"):
        make_key(folder / "key.pem")


def test_what_is_no_export_is_refused(folder: Path) -> None:
    made(folder, Sources(Folder(folder / "export")))
    with pytest.raises(Conflict, match="is a registered folder"):
        made(folder, Sources(Folder(folder / "made")), "again")
    with pytest.raises(NotFound, match="has no files"):
        made(folder, Sources(Folder(folder / "nosuch")), "none")
    (folder / "export" / "config.json").unlink()
    with pytest.raises(NotFound, match=r"has no config\.json"):
        made(folder, Sources(Folder(folder / "export")), "empty")
    with pytest.raises(DataError, match="is not a registered model"):
        verify_folder(folder / "export")


def test_signatures_without_their_package_say_how_to_get_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "model_signing", None)
    with pytest.raises(InvalidInput, match=r"pip install 'paceline\[registry\]'"):
        made(folder, Sources(Folder(folder / "export")))

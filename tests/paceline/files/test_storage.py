"""Folders on a disk and in an object store behave alike."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.encryption.encrypted_file import encrypt
from paceline.encryption.storage_key import StorageKey
from paceline.errors import SpecError
from paceline.files.storage import Folder
from paceline.weights.store.object_store import WeightStore


@pytest.fixture(params=["local", "file URL", "store"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    places = {
        "local": str(tmp_path / "runs"),
        "file URL": f"file://{tmp_path}/runs",
        "store": f"memory://{tmp_path.name}/runs",
    }
    return Folder(places[request.param])


def test_files_are_written_listed_read_and_removed(folder: Folder) -> None:
    assert not folder.exists()
    assert folder.folders() == []
    one = folder / "one"
    one.make()
    one.write("a.bin", b"first")
    one.write("a.bin", b"second")
    inner = one / "inner"
    inner.make()
    inner.write("b.bin", b"")
    assert one.files() == {"a.bin": 6, "inner/b.bin": 0}
    assert one.read("a.bin") == b"second"
    assert one.sha256("a.bin") == hashlib.sha256(b"second").hexdigest()
    assert one.exists("a.bin")
    assert not one.exists("c.bin")
    assert [(found.name, found) for found in folder.folders()] == [("one", one)]
    one.delete("a.bin")
    one.delete("a.bin")
    assert one.files() == {"inner/b.bin": 0}
    with pytest.raises(FileNotFoundError):
        one.read("a.bin")
    one.remove()
    one.remove()
    assert folder.folders() == []


def test_a_local_file_url_is_the_path(tmp_path: Path) -> None:
    assert Folder(f"file://{tmp_path}").local == tmp_path
    assert Folder(tmp_path) == Folder(f"{tmp_path}/") == Folder(f"file://{tmp_path}")
    assert Folder("memory://runs").local is None
    assert str(Folder("memory://runs/") / "1-2") == "memory://runs/1-2"


@pytest.mark.parametrize(("kind", "name"), [(Folder, "the storage"), (WeightStore, "weights.store")])
def test_an_unknown_scheme_is_refused_with_the_remedy(kind: Callable[[str], object], name: str) -> None:
    for url in ("nowhere://x", "github://x"):  # unknown, and one that needs more than a URL
        with pytest.raises(SpecError, match=rf"{name} '{url}' cannot be used: .*; name a local folder, or"):
            kind(url)


def test_an_encrypted_file_is_read_decrypted_and_hashed_as_it_is_stored(tmp_path: Path, given_key: StorageKey) -> None:
    folder, stored = Folder(tmp_path), encrypt(b"text", given_key)
    folder.write("f", stored)
    assert folder.read("f") == b"text"
    assert (folder.files(), folder.sha256("f")) == ({"f": len(stored)}, hashlib.sha256(stored).hexdigest())
    with folder.open("f") as file:
        assert file.read() == stored

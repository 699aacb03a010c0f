"""The root that `--store` names: folders, URLs, stores that refuse writes or are unreachable."""

from __future__ import annotations

import uuid
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from paceline.errors import InvalidInput
from paceline.files.storage import refusal_of_store, store_root


class NoCredentialsError(Exception):
    """As botocore's, which has no base in common with OSError."""


def test_the_ledgers_own_folder_is_the_default(tmp_path: Path) -> None:
    assert store_root("", tmp_path) == ""
    assert store_root(str(tmp_path), tmp_path) == ""
    assert store_root(str(tmp_path / "large"), tmp_path) == str(tmp_path / "large")
    assert store_root("memory://large/", tmp_path) == "memory://large"
    assert store_root(f"file://{tmp_path}/large", tmp_path / "ledger") == f"{tmp_path}/large"
    with pytest.raises(InvalidInput, match="--store 's4://large' cannot be used"):
        store_root("s4://large", tmp_path)


class FailingStore(MemoryFileSystem):
    """An object store whose writes fail with `error`."""

    protocol = "failing"
    error = Exception()

    def pipe_file(self, *_: object, **__: object) -> None:
        raise self.error


def test_a_store_that_refuses_is_an_error_and_an_unreachable_one_is_not(tmp_path: Path) -> None:
    fsspec.register_implementation("failing", FailingStore, clobber=True)
    assert refusal_of_store(f"memory://{uuid.uuid4().hex}") == refusal_of_store(str(tmp_path / "new")) == ""
    (tmp_path / "file").write_text("")
    assert "cannot be written: NotADirectoryError" in refusal_of_store(str(tmp_path / "file" / "below"))
    for error, words in (
        (PermissionError("Access Denied"), "PermissionError: Access Denied; correct its name"),
        (NoCredentialsError("no keys"), "NoCredentialsError: no keys"),
        (ConnectionError("nobody listens"), ""),
    ):
        FailingStore.error = error
        refusal = refusal_of_store("failing://store")
        assert words in refusal
        assert bool(words) == bool(refusal)

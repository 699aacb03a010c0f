"""A learner works with the coordinator's storage key, or names both keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.encryption.encrypted_file import WrongKey
from paceline.encryption.storage_key import FILE_VARIABLE, StorageKey
from paceline.services.learner.training.run import check_key
from paceline.v1 import worker_pb2


def test_the_same_key_or_none_on_both_sides_passes(given_key: StorageKey, monkeypatch: pytest.MonkeyPatch) -> None:
    check_key(worker_pb2.RunAssignment(run_id="run-1", storage_key=given_key.name.hex()))
    monkeypatch.delenv("PACELINE_STORAGE_KEY")
    check_key(worker_pb2.RunAssignment(run_id="run-1"))


def test_different_keys_are_refused_with_both_names(given_key: StorageKey, monkeypatch: pytest.MonkeyPatch) -> None:
    own = given_key.name.hex()
    with pytest.raises(
        WrongKey, match=f"has the storage key {own}, but the coordinator has the storage key 00ff; start both"
    ):
        check_key(worker_pb2.RunAssignment(run_id="run-1", storage_key="00ff"))
    with pytest.raises(WrongKey, match=f"has the storage key {own}, but the coordinator has no storage key"):
        check_key(worker_pb2.RunAssignment(run_id="run-1"))
    monkeypatch.delenv("PACELINE_STORAGE_KEY")
    with pytest.raises(WrongKey, match=r"has no storage key.*`paceline resume run-1`"):
        check_key(worker_pb2.RunAssignment(run_id="run-1", storage_key=own))


def test_a_key_that_cannot_be_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(WrongKey, match=r"cannot be read.*`paceline resume run-1`"):
        check_key(worker_pb2.RunAssignment(run_id="run-1"))

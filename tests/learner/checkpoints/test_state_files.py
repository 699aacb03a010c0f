"""Encrypted checkpoints contain nothing readable, training continues from them bit for bit, and a different key is
named."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from tiny_policy import CPU, make_batch, make_spec, save_tiny_policy

from paceline.encryption.encrypted_file import CHUNK_BYTES, WrongKey, is_encrypted
from paceline.encryption.storage_key import KEY_VARIABLE, StorageKey
from paceline.errors import Conflict
from paceline.files.storage import Folder
from paceline.learner.checkpoints import checkpoint
from paceline.learner.checkpoints.checkpoint import Checkpoint
from paceline.learner.checkpoints.manifest import check_files, read_manifest
from paceline.learner.checkpoints.upload_queue import UploadQueue
from paceline.learner.step.trainer import Trainer

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


def trained(policy: Path, steps: int) -> Trainer:
    trainer = Trainer(make_spec(policy), CPU)
    for step in range(steps):
        trainer.train_step(make_batch(), step)
    return trainer


def save(trainer: Trainer, directory: Path | str) -> Checkpoint:
    saved = checkpoint.save(directory, session=1, step=2, model=trainer.model, optimizer=trainer.optimizer)
    assert saved is not None
    return saved


def load(saved: Checkpoint, trainer: Trainer) -> None:
    checkpoint.load(saved.path, expected_sha256=saved.manifest_sha256, model=trainer.model, optimizer=trainer.optimizer)


@pytest.mark.parametrize("where", ["disk", "store"])
def test_training_goes_on_bit_for_bit(policy: Path, tmp_path: Path, given_key: StorageKey, where: str) -> None:
    uninterrupted = trained(policy, 3)
    saved = save(trained(policy, 2), tmp_path if where == "disk" else f"memory://{uuid4().hex}")
    resumed = Trainer(make_spec(policy), CPU)
    load(saved, resumed)
    resumed.train_step(make_batch(), 2)
    expected = uninterrupted.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.model.state_dict().items())


def test_every_file_but_the_manifest_is_encrypted(policy: Path, tmp_path: Path, given_key: StorageKey) -> None:
    trainer = trained(policy, 2)
    saved = save(trainer, tmp_path)
    folder = saved.path.local
    assert folder is not None
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    manifest = files.pop("manifest.json")
    assert files.keys() == {"__0_0.distcp", ".metadata"}
    assert all(is_encrypted(content) for content in files.values())
    names = [name.encode() for name in trainer.model.state_dict()]
    rows = [tensor.flatten()[:16].numpy().tobytes() for tensor in trainer.model.state_dict().values()]
    assert not any(secret in content for secret in [*names, *rows] for content in [*files.values(), manifest])


def test_the_manifest_is_compared_without_the_key(
    policy: Path, tmp_path: Path, given_key: StorageKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save(trained(policy, 0), tmp_path)
    monkeypatch.delenv(KEY_VARIABLE)
    check_files(saved.path, read_manifest(saved.path)[0])


def test_it_waits_encrypted_in_the_spool_and_is_loaded_from_the_store(
    policy: Path, tmp_path: Path, given_key: StorageKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_SPOOL", str(tmp_path))
    stored: list[Checkpoint] = []
    queue = UploadQueue(Folder(f"memory://{uuid4().hex}"), 0, stored.append, lambda message: None)
    trainer = trained(policy, 1)
    saved = save(trainer, queue.spool)
    files = [path for path in queue.spool.rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert len(files) == 2
    assert all(is_encrypted(path.read_bytes()) for path in files)
    queue.add(saved.path, saved)
    assert queue.wait_stored(DEADLINE_S)
    queue.close()
    fresh = Trainer(make_spec(policy), CPU)
    load(stored[0], fresh)
    expected = trainer.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in fresh.model.state_dict().items())


def test_another_key_and_no_key_are_named(
    policy: Path, tmp_path: Path, given_key: StorageKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trained(policy, 0)
    saved = save(trainer, tmp_path)
    other = os.urandom(32)
    monkeypatch.setenv(KEY_VARIABLE, other.hex())
    names = f"{given_key.name.hex()}, not with {StorageKey(other).name.hex()}"
    with pytest.raises(WrongKey, match=rf"1-2/\.metadata is encrypted with the key {names}"):
        load(saved, trainer)
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(WrongKey, match="no key is given"):
        load(saved, trainer)


def test_a_plain_checkpoint_is_loaded_with_a_key(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trained(policy, 1)
    saved = save(trainer, tmp_path)
    monkeypatch.setenv(KEY_VARIABLE, os.urandom(32).hex())
    fresh = Trainer(make_spec(policy), CPU)
    load(saved, fresh)
    expected = trainer.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in fresh.model.state_dict().items())


def test_damage_is_found_by_the_manifest(policy: Path, tmp_path: Path, given_key: StorageKey) -> None:
    trainer = trained(policy, 0)
    saved = save(trainer, tmp_path)
    path = Path(saved.path) / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(Conflict, match="SHA-256"):
        load(saved, trainer)


def test_memory_holds_a_chunk_of_a_file_and_not_the_file(tmp_path: Path, given_key: StorageKey) -> None:
    size_bytes = 256 << 20
    state = {"weights": torch.zeros(size_bytes // 4)}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    checkpoint.write(state, Folder(tmp_path), session=1, step=1)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < size_bytes // 4 + 16 * CHUNK_BYTES

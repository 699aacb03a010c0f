"""Checkpoints written during training: they have the state of their step, and the training is unchanged."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_policy import CPU, make_batch, make_spec, save_tiny_policy

from paceline.errors import Conflict, Unavailable
from paceline.learner.checkpoints import checkpoint
from paceline.learner.checkpoints import writer as writing
from paceline.learner.checkpoints.writer import SPARE_BYTES, CheckpointWriter, size_bytes
from paceline.learner.step.trainer import Trainer

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def trainer(policy: Path) -> Trainer:
    trainer = Trainer(make_spec(policy), CPU)
    trainer.train_step(make_batch(), 0)
    return trainer


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writing begins when this is set, as on a slow disk."""
    go, write = threading.Event(), checkpoint.write

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert go.wait(DEADLINE_S)
        return write(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "write", slow)
    yield go
    go.set()


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def test_steps_go_on_while_the_files_are_written_and_do_not_reach_them(
    trainer: Trainer, policy: Path, tmp_path: Path, held: threading.Event
) -> None:
    before = weights(trainer)
    writer = CheckpointWriter(tmp_path, session=3)
    writer.begin(1, trainer.model, trainer.optimizer, "c4a1")
    trainer.train_step(make_batch(), 1)  # while nothing is on the disk yet
    trainer.train_step(make_batch(), 2)
    assert writer.in_progress
    assert not writer.ready
    assert checkpoint.list_positions(tmp_path) == []
    held.set()
    saved = writer.finish()

    assert saved is not None
    assert not writer.in_progress
    assert (saved.path.name, saved.manifest.step, saved.manifest.chain_hash) == ("3-1", 1, "c4a1")
    assert saved.manifest.num_threads == torch.get_num_threads()
    after = weights(trainer)
    resumed = Trainer(make_spec(policy), CPU)
    checkpoint.load(saved.path, expected_sha256=saved.manifest_sha256, model=resumed.model, optimizer=resumed.optimizer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(resumed).items())
    resumed.train_step(make_batch(), 1)
    resumed.train_step(make_batch(), 2)
    assert all(torch.equal(tensor, after[name]) for name, tensor in weights(resumed).items())


def test_one_is_in_the_making_at_a_time(trainer: Trainer, tmp_path: Path, held: threading.Event) -> None:
    writer = CheckpointWriter(tmp_path, session=1)
    assert writer.finish() is None
    writer.begin(1, trainer.model, trainer.optimizer)
    with pytest.raises(RuntimeError, match="finish it first"):
        writer.begin(2, trainer.model, trainer.optimizer)
    held.set()
    assert writer.finish() is not None
    with pytest.raises(Conflict, match="exists and is complete"):
        writer.begin(1, trainer.model, trainer.optimizer)
    writer.begin(2, trainer.model, trainer.optimizer)
    assert writer.finish() is not None
    assert [folder.name for _, folder in checkpoint.list_positions(tmp_path)] == ["1-1", "1-2"]


def test_a_failure_is_raised_where_it_can_be_answered_and_leaves_nothing_complete(
    trainer: Trainer, tmp_path: Path, held: threading.Event
) -> None:
    writer = CheckpointWriter(tmp_path, session=1)
    writer.begin(1, trainer.model, trainer.optimizer)
    shutil.rmtree(tmp_path / "1-1")
    (tmp_path / "1-1").write_text("somebody else's file")
    held.set()
    with pytest.raises(Unavailable, match="could not be written"):
        writer.finish()
    assert checkpoint.list_positions(tmp_path) == []
    (tmp_path / "1-1").unlink()
    writer.begin(2, trainer.model, trainer.optimizer)
    assert writer.finish() is not None


def test_a_state_that_does_not_change_is_written_without_a_copy(
    trainer: Trainer, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(*_: Any) -> Any:
        raise AssertionError("the state was copied")

    monkeypatch.setattr("paceline.learner.checkpoints.writer.BlockingAsyncStager", copied)
    writer = CheckpointWriter(tmp_path, session=3)
    writer.begin(1, trainer.model, trainer.optimizer, "c4a1", unchanged=True)
    saved = writer.finish()
    assert saved is not None
    again = Trainer(make_spec(policy), CPU)
    checkpoint.load(saved.path, expected_sha256=saved.manifest_sha256, model=again.model, optimizer=again.optimizer)
    assert all(torch.equal(tensor, again.model.state_dict()[name]) for name, tensor in weights(trainer).items())


def test_training_waits_for_the_files_where_the_host_has_no_memory_for_a_copy(
    trainer: Trainer, policy: Path, tmp_path: Path
) -> None:
    state = checkpoint.whole_state(trainer.model, trainer.optimizer)
    parameters = sum(parameter.nbytes for parameter in trainer.model.parameters())
    assert size_bytes(state) > 3 * parameters, "weights and two moments"
    before = weights(trainer)
    available = SPARE_BYTES + size_bytes(state) - 1
    writer = CheckpointWriter(tmp_path, session=3, available=lambda: available)
    writer.begin(1, trainer.model, trainer.optimizer, "c4a1")
    assert writer.ready, "it is written when begin returns"
    trainer.train_step(make_batch(), 1)
    saved = writer.finish()
    assert saved is not None
    again = Trainer(make_spec(policy), CPU)
    checkpoint.load(saved.path, expected_sha256=saved.manifest_sha256, model=again.model)
    assert all(torch.equal(tensor, again.model.state_dict()[name]) for name, tensor in before.items())


def test_the_pinned_copy_of_a_gpus_state_is_kept_and_has_each_state(
    trainer: Trainer, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(writing, "on_gpu", lambda model: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    writer = CheckpointWriter(tmp_path, session=3)
    for step in (1, 2):
        expected = weights(trainer)
        writer.begin(step, trainer.model, trainer.optimizer)
        trainer.train_step(make_batch(), step)
        saved = writer.finish()
        assert saved is not None
        loaded = Trainer(make_spec(policy), CPU)
        sha256 = saved.manifest_sha256
        checkpoint.load(saved.path, expected_sha256=sha256, model=loaded.model, optimizer=loaded.optimizer)
        found = weights(loaded)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        if step == 1:
            first = len(pinned)
    assert first > len(expected)  # moments too
    assert len(pinned) == first


def test_a_driver_that_pins_no_more_costs_speed_alone(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(writing, "on_gpu", lambda model: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    writer = CheckpointWriter(tmp_path, session=3)
    writer.begin(1, trainer.model, trainer.optimizer)
    assert writer.finish() is not None

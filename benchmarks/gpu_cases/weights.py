"""Checkpoints."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_cases.training import batch_of, fitting, room_of, seconds
from paceline.learner.checkpoints import checkpoint
from paceline.learner.step.trainer import Trainer


def save_and_load(folder: Path, device: torch.device, tokens: int) -> dict[str, Any]:
    """Write a checkpoint, load it into another trainer, and compare the next step's loss."""
    spec, shape = fitting(folder, tokens, {}, room_of(device))
    trainer = Trainer(spec, device)
    trainer.train_step(batch_of(tokens, shape.vocabulary, 0), 0)
    with tempfile.TemporaryDirectory() as out:
        with seconds(device) as saving:
            saved = checkpoint.save(out, session=1, step=1, model=trainer.model, optimizer=trainer.optimizer)
        assert saved is not None
        expected = trainer.train_step(batch_of(tokens, shape.vocabulary, 1), 1)["loss"]
        size = sum(path.stat().st_size for path in Path(saved.path).rglob("*") if path.is_file())
        with seconds(device) as loading:
            checkpoint.load(
                saved.path,
                expected_sha256=saved.manifest_sha256,
                model=trainer.model,
                optimizer=trainer.optimizer,
            )
        again = trainer.train_step(batch_of(tokens, shape.vocabulary, 1), 1)["loss"]
    return {"bytes": size, "save_s": saving[0], "load_s": loading[0], "loss": expected, "resumed_loss": again}

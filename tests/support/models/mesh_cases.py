"""What ranks of every mesh have to train as one rank does, and the parts of a batch that each of them gets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loaded_models import save_model
from tiny_policy import make_batch, make_judged_batch, save_tiny_policy

from paceline.learner.batch.samples import TrainingSample

KL = {"loss_fn": {"reference_policy_kl_penalty": 0.5}}
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("dense", {}),
    "moe": ("moe", {}),
    "lora": ("dense", {"lora_cfg": {"enabled": True, "dim": 3}, **KL}),
    "ppo": ("dense", {"loss_fn": {"preset": "ppo"}, "num_updates_per_step": 2}),
    "dpo": ("dense", {"algorithm": "dpo"}),
}
"""Model and settings by name. All pack several sequences into a row, and more than one row into an update."""
ROW_TOKENS = 24
TOLERANCE = 1e-5
"""Largest difference of a loss or of a gradient's element, in float32."""


def save_models(folder: Path) -> None:
    """Write the models of the cases."""
    save_tiny_policy(folder / "dense")
    save_model("moe", folder / "moe")


def batch_of(name: str) -> list[TrainingSample]:
    """The whole batch of a case."""
    return make_judged_batch("dpo") if name == "dpo" else make_batch()


def part_of(batch: list[TrainingSample], rank: int, ranks: int) -> list[TrainingSample]:
    """The samples of one rank: whole groups in turn, of which the last rank has none where there are more than two."""
    sharing = ranks - 1 if ranks > 2 else ranks
    return [sample for sample in batch if sample.group_id % sharing == rank]

"""A tiny Qwen3, specs and batches that the learner's tests share, and the cases that one and two ranks both run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from learner.batch import TrainSequence
from learner.trainer import Trainer
from paceline.spec import RunSpec

VOCABULARY = 23
CPU = torch.device("cpu")


def save_tiny_policy(folder: Path, *, tied: bool = True, seed: int = 0, **config: Any) -> Path:
    torch.manual_seed(seed)
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.2,
        "tie_word_embeddings": tied,
    }
    Qwen3ForCausalLM(Qwen3Config(**{**fields, **config})).save_pretrained(folder)
    return folder


def make_spec(
    model: Path,
    algorithm: str = "grpo",
    loss_fn: dict[str, Any] | None = None,
    grpo: dict[str, Any] | None = None,
    **policy: Any,
) -> RunSpec:
    optimizer = {"lr": 1e-2, "weight_decay": 0.1}
    generation = {"max_new_tokens": 16, "temperature": 0.8}
    return RunSpec.model_validate(
        {
            "algorithm": algorithm,
            "policy": {
                "model_name": str(model),
                "max_grad_norm": 1e9,
                "optimizer": optimizer,
                "generation": generation,
                "logprob_chunk_tokens": 7,
                **policy,
            },
            "data": {"train": "unused.jsonl"},
            "rewards": [{"function": "length"}],
            "loss_fn": loss_fn or {},
            "grpo": grpo or {},
        }
    )


def make_batch(*, supervised: bool = False) -> list[TrainSequence]:
    """Eight sequences of four groups, all lengths different but two, one of them without a completion token."""
    rng, reward_rng = np.random.default_rng(5), np.random.default_rng(6)
    batch = []
    for i, (prompt, completion) in enumerate(
        [(3, 9), (3, 4), (5, 1), (5, 0), (2, 12), (2, 7), (4, 4), (4, 3)]
    ):
        batch.append(
            TrainSequence(
                group_id=100 + i // 2,
                prompt_ids=rng.integers(0, VOCABULARY, prompt).astype(np.int32),
                completion_ids=rng.integers(0, VOCABULARY, completion).astype(np.int32),
                behaviour_logprobs_T=None
                if supervised
                else rng.uniform(-4, -2, completion).astype(np.float32),
                advantage=float(rng.normal()),
                versions_T=None if supervised else np.full(completion, i // 4, np.int32),
                rewards_F=None if supervised else reward_rng.normal(size=1).astype(np.float32),
            )
        )
    return batch


CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_fn": {"reduction": "grpo"}},
    "dapo": {"loss_fn": {"reduction": "dapo"}},
    "dr_grpo": {"loss_fn": {"reduction": "dr_grpo"}},
    "kl": {"loss_fn": {"reference_policy_kl_penalty": 0.1, "reduction": "grpo"}},
    "updates": {"num_updates_per_step": 2},
    "gspo": {"loss_fn": {"preset": "gspo"}, "num_updates_per_step": 2},
    "log_linear": {"loss_fn": {"proximal_policy": "log_linear"}, "num_updates_per_step": 2},
    "m2po": {"loss_fn": {"preset": "m2po"}},
    "entropy": {"loss_fn": {"entropy_bonus": 0.1}},
    "gdpo": {"grpo": {"advantage": "gdpo"}},
    "rloo": {"loss_fn": {"preset": "rloo"}, "num_updates_per_step": 2},
    "reinforce_pp": {"loss_fn": {"preset": "reinforce_pp", "reference_policy_kl_penalty": 0.5}},
    "checkpointing": {"activation_checkpointing": True},
    "sft": {"algorithm": "sft"},
}


def run_case(
    model: Path, case: dict[str, Any], batch: list[TrainSequence], budget: int
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Two steps; metrics of the second, gradients of the first update and weights after the last.

    Two, so that a mistake in what is left over after a step shows.
    """
    trainer = Trainer(make_spec(model, train_mb_tokens=budget, **case), CPU)
    tensors: dict[str, Tensor] = {}

    def keep_gradients(*_: Any) -> None:
        for name, parameter in trainer.model.named_parameters():
            assert parameter.grad is not None
            tensors.setdefault(f"grad.{name}", whole(parameter.grad).clone())

    trainer.optimizer.register_step_pre_hook(keep_gradients)
    trainer.train_step(batch, 0)
    metrics = trainer.train_step(batch, 1)
    for name, parameter in trainer.model.named_parameters():
        tensors[f"weight.{name}"] = whole(parameter.detach()).clone()
    return metrics, tensors


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

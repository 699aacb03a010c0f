"""A tiny Qwen3, specs and batches that the learner's tests share, and the cases that one and two ranks both run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_models import SIZES, tiny_qwen3
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.learner.batch.samples import PreferenceLabel, TrainingSample
from paceline.learner.step.trainer import Trainer
from paceline.spec import RunSpec

VOCABULARY = SIZES["vocab_size"]
CPU = torch.device("cpu")


def save_tiny_policy(folder: Path, *, tied: bool = True, seed: int = 0, **config: Any) -> Path:
    tiny_qwen3(seed=seed, tie_word_embeddings=tied, **config).save_pretrained(folder)
    return folder


def make_spec(
    model: Path,
    algorithm: str = "grpo",
    loss_fn: dict[str, Any] | None = None,
    grpo: dict[str, Any] | None = None,
    sections: dict[str, dict[str, Any]] | None = None,
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
            **(sections or {}),
        }
    )


def make_batch(*, supervised: bool = False) -> list[TrainingSample]:
    """Eight sequences of four groups, all lengths different but two, one of them without a completion token."""
    rng, reward_rng, reference_rng = (np.random.default_rng(seed) for seed in (5, 6, 8))
    batch = []
    for i, (prompt, completion) in enumerate([(3, 9), (3, 4), (5, 1), (5, 0), (2, 12), (2, 7), (4, 4), (4, 3)]):
        batch.append(
            TrainingSample(
                group_id=100 + i // 2,
                prompt_ids=rng.integers(0, VOCABULARY, prompt).astype(np.int32),
                completion_ids=rng.integers(0, VOCABULARY, completion).astype(np.int32),
                behaviour_logprobs_T=None if supervised else rng.uniform(-4, -2, completion).astype(np.float32),
                versions_T=None if supervised else np.full(completion, i // 4, np.int32),
                rewards_F=None if supervised else reward_rng.normal(size=1).astype(np.float32),
                reference_logprobs_T=None
                if supervised
                else reference_rng.uniform(-4, -2, completion).astype(np.float32),
                truncated=not supervised and i in (0, 4, 7),
            )
        )
    return batch


KL_IN_REWARD = {
    "reference_policy_kl_penalty": 0.5,
    "reference_policy_kl_type": "k1",
    "use_kl_in_reward": True,
}

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_fn": {"reduction": "grpo"}},
    "dapo": {"loss_fn": {"reduction": "dapo"}},
    "dr_grpo": {"loss_fn": {"reduction": "dr_grpo"}},
    "kl": {"loss_fn": {"reference_policy_kl_penalty": 0.1, "reduction": "grpo"}},
    "kl_by_the_pool": {
        "loss_fn": {"reference_policy_kl_penalty": 0.5, "reference_policy_pool": "reward"},
        "num_updates_per_step": 2,
    },
    "distillation_by_the_pool": {
        "algorithm": "distillation",
        "sections": {"distillation": {"teacher_model_name": "elsewhere", "teacher_pool": "reward"}},
    },
    "updates": {"num_updates_per_step": 2},
    "gspo": {"loss_fn": {"preset": "gspo"}, "num_updates_per_step": 2},
    "log_linear": {"loss_fn": {"proximal_policy": "log_linear"}, "num_updates_per_step": 2},
    "m2po": {"loss_fn": {"preset": "m2po"}},
    "entropy": {"loss_fn": {"entropy_bonus": 0.1}},
    "gdpo": {"grpo": {"advantage": "gdpo"}},
    "rloo": {"loss_fn": {"preset": "rloo"}, "num_updates_per_step": 2},
    "reinforce_pp": {"loss_fn": {"preset": "reinforce_pp", "reference_policy_kl_penalty": 0.5}},
    "ppo": {"loss_fn": {"preset": "ppo", **KL_IN_REWARD}, "num_updates_per_step": 2},
    "checkpointing": {"activation_checkpointing": True},
    "lora": {"lora_cfg": {"enabled": True, "dim": 3}, "loss_fn": {"reference_policy_kl_penalty": 0.5}},
    "sft": {"algorithm": "sft"},
    "dpo": {"algorithm": "dpo"},
    "dpo_ipo_sft": {
        "algorithm": "dpo",
        "sections": {"dpo": {"preference_loss": "ipo", "sft_loss_weight": 0.3, "sft_average_log_probs": True}},
    },
    "dpo_updates": {"algorithm": "dpo", "num_updates_per_step": 2},
    "orpo": {"algorithm": "orpo", "sections": {"orpo": {"odds_ratio_weight": 0.5}}},
    "kto": {"algorithm": "kto", "sections": {"kto": {"undesirable_weight": 1.5}}},
    "rm": {"algorithm": "rm"},
    "shared_prompts": {
        "shared_prompts": True,
        "num_updates_per_step": 2,
        "loss_fn": {"reference_policy_kl_penalty": 0.5, "reduction": "grpo"},
    },
}


def make_judged_batch(kind: str) -> list[TrainingSample]:
    """Four prompts: three with a rejected completion, one with two. `kto` has each completion by itself, and another
    one's after its prompt to measure the KL on; `rm` has whole texts."""
    rng = np.random.default_rng(7)
    batch = []
    for group_id, lengths in ((100, (6, 3, 5)), (101, (4, 4)), (102, (1, 8)), (103, (7, 2))):
        prompt_ids = rng.integers(0, VOCABULARY, group_id % 4 + 2).astype(np.int32)
        for place, length in enumerate(lengths):
            ids = rng.integers(0, VOCABULARY, length).astype(np.int32)
            label = PreferenceLabel(place == 0, margin=0.5 if place == 0 else 0.0)
            if kind == "rm":
                text = np.concatenate((prompt_ids, ids))
                batch.append(TrainingSample(group_id, text, np.zeros(1, np.int32), label=label))
                continue
            batch.append(TrainingSample(group_id, prompt_ids, ids, label=label))
            if kind == "kto":
                foreign = rng.integers(0, VOCABULARY, 4).astype(np.int32)
                mismatched = label._replace(mismatched=True)
                batch.append(TrainingSample(group_id, prompt_ids, foreign, label=mismatched))
    return batch


def with_long_prompts(batch: list[TrainingSample]) -> list[TrainingSample]:
    """Return the batch with 20 more tokens before each prompt, the same for a group; groups of even id have one prompt."""
    longer, first_of = [], {}
    for sample in batch:
        before = np.random.default_rng(sample.group_id).integers(0, VOCABULARY, 20).astype(np.int32)
        own = sample.prompt_ids if sample.group_id % 2 else first_of.setdefault(sample.group_id, sample.prompt_ids)
        longer.append(replace(sample, prompt_ids=np.concatenate((before, own))))
    return longer


def batch_of(name: str) -> list[TrainingSample]:
    """The batch that a case trains."""
    if name == "shared_prompts":
        return with_long_prompts(make_batch())
    algorithm = CASES[name].get("algorithm", "grpo")
    if algorithm in ("dpo", "orpo", "kto", "rm"):
        return make_judged_batch(algorithm)
    return make_batch(supervised=algorithm == "sft")


def rank_part(batch: list[TrainingSample], rank: int) -> list[TrainingSample]:
    """Return the samples that each of two ranks trains. Rank 1 has a single sequence, and group 103 is on both ranks; or, of examples that
    may not be separated, the last prompt."""
    judged = batch[0].label is not None
    cut = next(i for i, s in enumerate(batch) if s.group_id == 103) if judged else 7
    return batch[:cut] if rank == 0 else batch[cut:]


def run_case(
    model: Path,
    case: dict[str, Any],
    batch: list[TrainingSample],
    budget: int | None,
    device: torch.device = CPU,
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Two steps; metrics of the second, gradients of the first update and weights after the last.

    `budget` is policy.train_mb_tokens; None: that of the case. Two, so that a mistake in what is left over after a step shows.
    """
    torch.manual_seed(11)  # for heads that are new
    tokens = {} if budget is None else {"train_mb_tokens": budget}
    trainer = Trainer(make_spec(model, **tokens, **case), device)
    trained = [("", trainer.model, trainer.optimizer)]
    if trainer.critic is not None:
        trained.append(("value.", trainer.critic.model, trainer.critic.optimizer))
    tensors: dict[str, Tensor] = {}

    def keep_gradients(prefix: str, model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                assert parameter.grad is None
                continue
            assert parameter.grad is not None
            tensors.setdefault(f"grad.{prefix}{name}", whole(parameter.grad).clone())

    for prefix, module, optimizer in trained:
        optimizer.register_step_pre_hook(lambda *_, p=prefix, m=module: keep_gradients(p, m))
    trainer.train_step(batch, 0)
    metrics = trainer.train_step(batch, 1)
    for prefix, module, _ in trained:
        for name, parameter in module.named_parameters():
            tensors[f"weight.{prefix}{name}"] = whole(parameter.detach()).clone()
    return metrics, tensors


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

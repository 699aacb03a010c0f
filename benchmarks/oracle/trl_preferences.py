"""TRL's own preference losses on given tensors, for `benchmarks/objectives_oracle.py`; runs in TRL's environment.

    python trl_preferences.py <folder with pairs.safetensors>

Calls `_compute_loss` of `DPOTrainer` and `KTOTrainer`, `compute_loss` of `RewardTrainer` and `odds_ratio_loss` of `ORPOTrainer` unchanged, on objects that have
the settings a trainer would have and models that answer with the given log-probabilities or scores. Writes losses
and gradients to trl.safetensors.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from preference_cases import DPO_CASES, KTO, ORPO, REWARD_CASES
from safetensors.torch import load_file, save_file
from torch import Tensor
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.orpo import ORPOTrainer


def trainer_with(**settings: Any) -> Any:
    """Return the attributes of a trainer that the loss functions read, in evaluation mode."""
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
    )
    return SimpleNamespace(
        accelerator=accelerator,
        model=SimpleNamespace(training=False),
        aux_loss_enabled=False,
        _total_train_tokens=0,
        _metrics={"eval": defaultdict(list)},
        precompute_ref_logps=True,
        **settings,
    )


def model_with(logps: Tensor) -> Any:
    """Answers with [S, L] token log-probabilities; what only metrics read is zero."""
    zero = torch.zeros_like(logps)
    outputs = SimpleNamespace(log_probs=logps, entropy=zero, mean_logits=zero, is_top1=zero.bool())
    return lambda **_: outputs


def token_inputs(mask: Tensor) -> dict[str, Tensor]:
    """Return a prompt of one token before each completion."""
    completion_mask = torch.cat((torch.zeros_like(mask[:, :1]), mask), 1).long()
    return {
        "input_ids": torch.zeros_like(completion_mask),
        "attention_mask": torch.ones_like(completion_mask),
        "completion_mask": completion_mask,
    }


def main(folder: Path) -> None:
    data = load_file(folder / "pairs.safetensors")
    mask = data["mask"]
    pairs = len(mask) // 2
    out: dict[str, Tensor] = {}

    def record(name: str, loss: Tensor, *inputs: Tensor) -> None:
        out[f"{name}/loss"] = loss.detach()
        out[f"{name}/gradient"] = torch.cat([g.flatten() for g in torch.autograd.grad(loss, inputs)])

    for name, case in DPO_CASES.items():
        logps = data["logps"].clone().requires_grad_()
        trainer = trainer_with(
            ld_alpha=None,
            f_divergence_type="reverse_kl",
            use_weighting=False,
            loss_types=[case["trl"]],
            loss_weights=[1.0],
            beta=case["beta"],
            label_smoothing=case.get("label_smoothing", 0.0),
        )
        reference = (data["reference"] * mask).sum(1)
        inputs = token_inputs(mask) | {
            "ref_chosen_logps": reference[:pairs],
            "ref_rejected_logps": reference[pairs:],
        }
        record(name, DPOTrainer._compute_loss(trainer, model_with(logps * mask), inputs, False), logps)

    logps = data["logps"].clone().requires_grad_()
    trainer = trainer_with(loss_type="kto", calculate_KL=True, **KTO["trl"])
    trainer._compute_kl_logps = lambda *_: data["kl_logps"]
    inputs = token_inputs(mask) | {
        "label": data["desirable"].bool(),
        "ref_logps": (data["reference"] * mask).sum(1),
        "ref_KL_logps": torch.zeros_like(data["kl_logps"]),
    }
    record("kto", KTOTrainer._compute_loss(trainer, model_with(logps * mask), inputs, False), logps)

    logps = data["logps"].clone().requires_grad_()
    means = (logps * mask).sum(1) / mask.sum(1)
    odds, *_ = ORPOTrainer.odds_ratio_loss(trainer_with(**ORPO), means[:pairs], means[pairs:])
    record("orpo, odds ratio", -odds.mean(), logps)

    for name, case in REWARD_CASES.items():
        scores = data["scores"].clone().requires_grad_()
        trainer = trainer_with(args=SimpleNamespace(center_rewards_coefficient=case["centring"]))
        inputs = token_inputs(mask) | ({"margin": data["margins"]} if case["margin"] else {})
        outputs = SimpleNamespace(logits=scores[:, None])
        record(name, RewardTrainer.compute_loss(trainer, lambda outputs=outputs, **_: outputs, inputs), scores)

    save_file(out, folder / "trl.safetensors")
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

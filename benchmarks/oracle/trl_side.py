"""TRL's own loss functions on given tensors, for `benchmarks/objectives_oracle.py`; runs in TRL's environment.

    python trl_side.py <folder with batch.safetensors>

Calls `GRPOTrainer._compute_loss` and `RLOOTrainer._compute_loss` unchanged, on an object that has the settings a
trainer would have and whose model answers with the given log-probabilities. Writes losses and gradients to
trl.safetensors. Only the importance ratio is made here, by the formula of TRL's generation step, which cannot be called
without generating.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from cases import CASES
from safetensors.torch import load_file, save_file
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer

DEFAULTS: dict[str, Any] = {
    "loss_type": "dapo",
    "epsilon": 0.2,
    "epsilon_high": 0.2,
    "delta": None,
    "beta": 0.0,
    "importance_sampling_level": "token",
    "use_bias_correction_kl": True,
    "off_policy_mask_threshold": None,
    "entropy_coef": 0.0,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "steps_per_generation": 1,
}


def trainer_with(settings: dict[str, Any], logps: Tensor, entropies: Tensor, max_tokens: int) -> Any:
    """Return the attributes of a trainer that `_compute_loss` reads, in evaluation mode (one batch, no
    accumulation)."""
    trainer = SimpleNamespace(
        **{
            name: settings[name]
            for name in (
                "loss_type",
                "beta",
                "importance_sampling_level",
                "off_policy_mask_threshold",
                "entropy_coef",
            )
        },
        args=SimpleNamespace(**settings),
        epsilon_low=settings["epsilon"],
        epsilon_high=settings["epsilon_high"],
        model=SimpleNamespace(training=False),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        use_vllm="is_mode" in settings,
        vllm_importance_sampling_correction=True,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=settings["entropy_coef"] != 0,
        max_completion_length=max_tokens,
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics={"eval": defaultdict(list)},
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logps, entropies, None)
    return trainer


def importance_ratio(old: Tensor, sampling: Tensor, mask: Tensor, settings: dict[str, Any]) -> Tensor:
    difference = (old - sampling) * mask
    mode, low, high = settings["is_mode"], settings.get("is_min"), settings.get("is_max")
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    if mode.endswith("truncate"):
        return ratio.clamp(min=low, max=high)
    outside = (ratio > high) | (ratio < (low or 0.0))
    return ratio.masked_fill(outside, 0.0)


def main(folder: Path) -> None:
    batch = load_file(folder / "batch.safetensors")
    mask, old, max_tokens = batch["mask"], batch["old"], int(batch["max_tokens"])
    out = {}
    for name, case in CASES.items():
        settings = {**DEFAULTS, **case.trl}
        logps = batch["current"].clone().requires_grad_()
        entropies = batch["entropy"].clone().requires_grad_()
        ids = torch.zeros_like(mask, dtype=torch.int64)
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": torch.ones_like(ids[:, :1]),
            "completion_ids": ids,
            "completion_mask": mask,
            "advantages": batch["advantages"],
            "old_per_token_logps": old,
            "ref_per_token_logps": batch["reference"],
            "num_items_in_batch": mask.sum(),
        }
        if "is_mode" in settings:
            inputs["importance_sampling_ratio"] = importance_ratio(old, batch["sampling"], mask, settings)
        if settings["off_policy_mask_threshold"] is not None:
            inputs["sampling_per_token_logps"] = batch["sampling"]
        trainer = trainer_with(settings, logps, entropies, max_tokens)
        if settings.get("trainer") == "rloo":
            loss = RLOOTrainer._compute_loss(trainer, None, {**inputs, "old_logps": (old * mask).sum(1)})
        else:
            loss = GRPOTrainer._compute_loss(trainer, None, inputs)
        gradients = torch.autograd.grad(loss, (logps, entropies), allow_unused=True, materialize_grads=True)
        out |= {f"{name}/loss": loss.detach(), f"{name}/logps": gradients[0], f"{name}/entropy": gradients[1]}
    save_file(out, folder / "trl.safetensors")
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

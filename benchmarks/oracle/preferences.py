"""Paceline's side of the preference oracle: the pairs, and loss and gradient laid out as TRL's."""

from __future__ import annotations

from pathlib import Path

import torch
from end_to_end import trl_environment
from oracle.preference_cases import DPO_CASES, KTO, ORPO, REWARD_CASES
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.learner.objectives.dpo import PairLogRatios, preference_loss
from paceline.learner.objectives.kto import kto_loss
from paceline.learner.objectives.orpo import orpo_loss
from paceline.learner.objectives.reward_model import reward_model_loss

LENGTHS = (12, 3, 7, 1, 5, 9, 4, 12)
"""Tokens of four chosen, then of their rejected completions."""
PAIRS = len(LENGTHS) // 2


def make_pairs(seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logps = -noise(len(LENGTHS), max(LENGTHS)).abs()
    return {
        "logps": logps,
        "reference": logps + noise(len(LENGTHS), max(LENGTHS)),
        "mask": (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).double(),
        "desirable": torch.tensor([1.0, 0, 1, 1, 0, 0, 1, 0]),
        "kl_logps": noise(len(LENGTHS)) + 0.8,
        "scores": 3 * noise(len(LENGTHS)),
        "margins": noise(PAIRS).abs(),
    }


def our_losses(data: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """By name: loss, and the gradient flattened."""
    lengths = torch.tensor(LENGTHS, dtype=torch.float64)
    results = {}
    for name, case in DPO_CASES.items():
        logps = data["logps"].clone().requires_grad_()
        log_ratios = ((logps - data["reference"]) * data["mask"]).sum(1)
        weights = torch.full((PAIRS,), 1 / PAIRS, dtype=torch.float64)
        pairs = PairLogRatios(log_ratios[:PAIRS], log_ratios[PAIRS:], lengths[:PAIRS], lengths[PAIRS:], weights)
        settings = {key: case[key] for key in ("beta", "label_smoothing", "average") if key in case}
        loss = preference_loss(pairs, case["kind"], **settings)
        results[name] = (loss.detach(), torch.autograd.grad(loss, logps)[0].flatten())
    logps = data["logps"].clone().requires_grad_()
    log_ratios = ((logps - data["reference"]) * data["mask"]).sum(1)
    loss = kto_loss(log_ratios, data["desirable"].bool(), data["kl_logps"].mean().item(), len(LENGTHS), **KTO["trl"])
    results["kto"] = (loss.detach(), torch.autograd.grad(loss, logps)[0].flatten())
    logps = data["logps"].clone().requires_grad_()
    means = (logps * data["mask"]).sum(1) / lengths
    weights = torch.full((PAIRS,), 1 / PAIRS, dtype=torch.float64)
    loss = orpo_loss(means[:PAIRS], means[PAIRS:], weights, **ORPO)
    results["orpo, odds ratio"] = (loss.detach(), torch.autograd.grad(loss, logps)[0].flatten())
    for name, case in REWARD_CASES.items():
        scores = data["scores"].clone().requires_grad_()
        loss = reward_model_loss(
            scores[:PAIRS],
            scores[PAIRS:],
            torch.full((PAIRS,), 1 / PAIRS, dtype=torch.float64),
            margins_P=data["margins"] if case["margin"] else None,
            centring=case["centring"] or 0.0,
        )
        results[name] = (loss.detach(), torch.autograd.grad(loss, scores)[0])
    return results


def differences(folder: Path) -> dict[str, dict[str, float]]:
    """By loss: TRL's value and the largest absolute differences of value and gradient."""
    data = make_pairs()
    save_file(data, folder / "pairs.safetensors")
    trl_environment.run_side(Path(__file__).with_name("trl_preferences.py"), folder)
    theirs = load_file(folder / "trl.safetensors")
    return {
        name: {
            "loss": theirs[f"{name}/loss"].item(),
            "value_difference": abs(loss - theirs[f"{name}/loss"]).item(),
            "gradient_difference": (gradient - theirs[f"{name}/gradient"]).abs().max().item(),
            "gradient_norm": theirs[f"{name}/gradient"].norm().item(),
        }
        for name, (loss, gradient) in our_losses(data).items()
    }

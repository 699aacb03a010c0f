"""AdamW and the learning rate over steps.

Promise: the learning rate is a function of the step alone, so a restart needs no scheduler state.
"""

from __future__ import annotations

import math

import torch

from paceline.spec import OptimizerSection, SchedulerSection


def make_optimizer(model: torch.nn.Module, config: OptimizerSection) -> torch.optim.AdamW:
    """Fused AdamW (Loshchilov and Hutter 2019); weight decay on matrices, none on norms and biases."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Gives all parameter groups this rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def lr_factor(step: int, max_num_steps: int, config: SchedulerSection) -> float:
    """The learning rate of a step as a fraction of the peak.

    Warm-up: (step + 1) / warmup_steps, so that no step has rate 0 and step warmup_steps - 1 has the peak. Then, with
    x going from 0 there to 1 at the last step and m = min_lr_ratio: `constant` 1, `linear` 1 - (1 - m)·x, `cosine`
    m + (1 - m)·(1 + cos πx)/2.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    peak_step = max(config.warmup_steps - 1, 0)
    x = min((step - peak_step) / max(max_num_steps - 1 - peak_step, 1), 1.0)
    floor = config.min_lr_ratio
    match config.name:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - (1.0 - floor) * x
        case "cosine":
            return floor + (1.0 - floor) * (1.0 + math.cos(math.pi * x)) / 2
        case _:
            raise ValueError(f"unknown schedule {config.name!r}")

"""AdamW and the learning rate over steps.

Promise: the learning rate is a function of the step alone, so a restart needs no scheduler state.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from paceline.learner.step.partwise_adamw import PartwiseAdamW
from paceline.spec import OptimizerSection, SchedulerSection

INVERSE_SQRT_TIMESCALE = 10_000
"""Steps over which `inverse_sqrt` falls where no warm-up sets the scale, as in transformers."""


def make_optimizer(model: torch.nn.Module, config: OptimizerSection) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov and Hutter 2019) with weight decay on matrices, none on norms and biases: torch's fused one,
    or one with moments in bfloat16 or in the host's memory."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    options: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.state_dtype == "bfloat16" or config.offload:
        dtype = getattr(torch, config.state_dtype)
        return PartwiseAdamW(filled, moment_dtype=dtype, on_host=config.offload, **options)
    return torch.optim.AdamW(filled, fused=True, **options)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give all parameter groups this rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def lr_factor(step: int, max_num_steps: int, config: SchedulerSection) -> float:
    """Return the learning rate of a step as a fraction of the peak.

    Warm-up of w steps: (step + 1)/w, so that no step has rate 0 and step w - 1 has the peak (transformers starts at 0 and
    is one step behind). Then, with x going from 0 there to 1 at the last step, m = min_lr_ratio and f a fall from 1 to 0,
    the factor is m + (1 - m)·f(x):

    - `linear`: 1 - x. `polynomial`: (1 - x)^power. `cosine`, `cosine_with_min_lr`: (1 + cos πx)/2 (Loshchilov and Hutter
      2017). `cosine_with_restarts`: the same in x·num_cycles mod 1, 0 at the end.
    - `wsd`: 1 until decay_steps before the end, then by y in (0, 1], 1 at the last step: `linear` 1 - y, `cosine`
      (1 + cos πy)/2, `1-sqrt` 1 - √y (Hu et al. 2024, arXiv 2404.06395; Hägele et al. 2024, arXiv 2405.18392).

    `constant`, `constant_with_warmup`: 1. `inverse_sqrt`: √(w/(step + 1)), with 10,000 for w where there is no warm-up, from
    the peak on (Vaswani et al. 2017; transformers).
    """
    warmup = config.num_warmup_steps(max_num_steps)
    if step < warmup:
        return (step + 1) / warmup
    if config.name in ("constant", "constant_with_warmup"):
        return 1.0
    if config.name == "inverse_sqrt":
        timescale = warmup or INVERSE_SQRT_TIMESCALE
        return math.sqrt(timescale / (step + 1 - warmup + timescale))
    floor = config.min_lr_ratio
    return floor + (1.0 - floor) * _fall(step, max_num_steps, config)


def _fall(step: int, max_num_steps: int, config: SchedulerSection) -> float:
    """Return the fall from 1 at the end of the warm-up to 0 at the last step."""
    peak_step = max(config.num_warmup_steps(max_num_steps) - 1, 0)
    x = min((step - peak_step) / max(max_num_steps - 1 - peak_step, 1), 1.0)
    match config.name:
        case "linear":
            return 1.0 - x
        case "polynomial":
            return float((1.0 - x) ** config.power)
        case "cosine" | "cosine_with_min_lr":
            return _half_cosine(x)
        case "cosine_with_restarts":
            return 0.0 if x == 1.0 else _half_cosine(x * config.num_cycles % 1.0)
        case "wsd":
            decay = config.decay_steps or 1
            y = min(max((step - (max_num_steps - 1 - decay)) / decay, 0.0), 1.0)
            shapes = {"linear": 1.0 - y, "cosine": _half_cosine(y), "1-sqrt": 1.0 - math.sqrt(y)}
            return shapes[config.decay_type]
        case _:
            raise ValueError(f"unknown schedule {config.name!r}")


def _half_cosine(x: float) -> float:
    return (1.0 + math.cos(math.pi * x)) / 2

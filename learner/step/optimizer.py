"""Processes gradients between the backward pass and the optimizer (reduction over ranks, norm, clipping), and has AdamW
and the learning rate. The learning rate is a function of the step alone, so that a restart needs no scheduler state."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from paceline.spec import OptimizerSection, SchedulerSection

INVERSE_SQRT_TIMESCALE = 10_000
"""Time scale of `inverse_sqrt` in steps if there is no warm-up, as in transformers."""


def make_optimizer(model: torch.nn.Module, config: OptimizerSection) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov and Hutter 2019) with weight decay on matrices and none on norms and biases: torch's
    fused AdamW, or `PartwiseAdamW` for moments in bfloat16 or in the host's memory."""
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
    for group in optimizer.param_groups:
        group["lr"] = lr


def lr_factor(step: int, max_num_steps: int, config: SchedulerSection) -> float:
    """Return the learning rate of a step as a fraction of the peak.

    Warm-up of w steps: (step + 1)/w, so that no step has rate 0 and step w - 1 has the peak (transformers starts at 0
    and is one step behind). Then, with x going from 0 at step w - 1 to 1 at the last step, m = min_lr_ratio and f a
    fall from 1 to 0, the factor is m + (1 - m)·f(x):

    - `linear`: 1 - x. `polynomial`: (1 - x)^power. `cosine`, `cosine_with_min_lr`: (1 + cos πx)/2 (Loshchilov and Hutter
      2017). `cosine_with_restarts`: the same in x·num_cycles mod 1, 0 at the end.
    - `wsd`: 1 until decay_steps before the end, then by y in (0, 1], 1 at the last step: `linear` 1 - y, `cosine`
      (1 + cos πy)/2, `1-sqrt` 1 - √y (Hu et al. 2024, arXiv 2404.06395; Hägele et al. 2024, arXiv 2405.18392).

    `constant`, `constant_with_warmup`: 1. `inverse_sqrt`: √(w/(step + 1)) from the peak on, with 10,000 for w if there
    is no warm-up (Vaswani et al. 2017; transformers).
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


PART_NUMEL = 1 << 22
"""Largest number of elements of a parameter that are updated at the same time."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class PartwiseAdamW(torch.optim.AdamW):
    """torch's AdamW that updates a part of a parameter at a time, for moments in bfloat16 or in the host's memory. Its
    state has the same entries, so checkpoints have the same form.

    The arithmetic is float32 on the parameter's device, and no copy of a whole moment exists there. Moments in bfloat16
    are rounded stochastically: to nearest, a second moment with β₂ = 0.999 would never fall, because a change of 0.1 %
    is less than half of bfloat16's last place. The random bits follow from the number of the update and the parameter's
    index, so a resumed or replayed run gets the same bits.
    """

    def __init__(
        self,
        params: Any,
        *,
        moment_dtype: torch.dtype,
        on_host: bool = False,
        part_numel: int = PART_NUMEL,
        **options: Any,
    ) -> None:
        super().__init__(params, foreach=False, **options)
        self._moment_dtype, self._on_host, self._part_numel = moment_dtype, on_host, part_numel
        self.register_load_state_dict_post_hook(lambda _: self._place_moments())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("PartwiseAdamW.step takes no closure")
        index = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                index += 1
                if parameter.grad is not None:
                    self._update(parameter, group, index)
        if self._on_host and any(parameter.is_cuda for parameter in self.state):
            torch.cuda.current_stream().synchronize()  # until then copies of moments to the host may be in progress
        return None

    def _update(self, parameter: Tensor, group: dict[str, Any], index: int) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in MOMENTS:
                state[name] = self._placed(torch.zeros_like(parameter, dtype=self._moment_dtype))
        state["step"] += 1
        update = int(state["step"].item())
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{index}/{update}".encode()))
        whole = [_local(each) for each in (parameter, parameter.grad, *(state[name] for name in MOMENTS))]
        for value, gradient, *moments in zip(
            *(torch.split(each.view(-1), self._part_numel) for each in whole), strict=True
        ):
            # Copies, unless they are float32 on this device already.
            mean, square = (
                moment.to(value.device, torch.float32, non_blocking=True, copy=self._on_host) for moment in moments
            )
            _update_part(value, gradient, mean, square, group=group, update=update)
            for moment, new in zip(moments, (mean, square), strict=True):
                if moment.dtype == torch.bfloat16:
                    new = rounded(new, generator)
                if moment is not new:
                    moment.copy_(new, non_blocking=True)

    def _place_moments(self) -> None:
        """Convert loaded moments to the type and device of their storage: torch loads them in the parameter's type
        (which represents every bfloat16 exactly) and on its device."""
        for state in self.state.values():
            for name in MOMENTS:
                if name in state:
                    state[name] = self._placed(state[name].to(self._moment_dtype))

    def _placed(self, moment: Tensor) -> Tensor:
        """Return a moment in the memory where it is kept between updates, pinned on the host."""
        if not self._on_host or not moment.is_cuda:
            return moment
        moment = moment.to("cpu")
        if isinstance(moment, DTensor):
            moment._local_tensor = moment._local_tensor.pin_memory()
            return moment
        return moment.pin_memory()


def _update_part(
    value: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, *, group: dict[str, Any], update: int
) -> None:
    """Update a part of a parameter, and of its moments in float32, all [n], in place."""
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    gradient = gradient.float()
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    value.mul_(1 - lr * group["weight_decay"])
    denominator = square.sqrt().div_((1 - beta2**update) ** 0.5).add_(group["eps"])
    value.addcdiv_(mean, denominator, value=-lr / (1 - beta1**update))


def rounded(values: Tensor, generator: torch.Generator) -> Tensor:
    """Return float32 `values` in bfloat16, each randomly rounded up or down so that its expectation is the value. A
    bfloat16 is the upper half of a float32: a random number below 2¹⁶ is added to the lower half, then dropped."""
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    return (bits + noise).bitwise_and_(-(1 << 16)).view(torch.float32).to(torch.bfloat16)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def set_gradient_sync(model: nn.Module, device: torch.device, is_last: bool) -> None:
    """Prepare the backward pass of a micro-batch. On CPUs, gradients are reduced and parameters freed once per update,
    because a collective for each pass costs more than the memory. On GPUs every pass reduces, so that no rank holds a
    full gradient."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(is_last)
        if device.type == "cpu":
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last)


def gradient_norm(model: nn.Module) -> float:
    """Return the global norm of the gradients. It is the same number on every rank, so all ranks decide alike."""
    norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return float((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())


def clip_gradients(model: nn.Module, max_norm: float, norm: float) -> None:
    """Scale the gradients, whose global norm is `norm`, to at most `max_norm`."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    if parameters:
        clip_grads_with_norm_(parameters, max_norm, torch.tensor(norm, device=parameters[0].device))

"""AdamW whose moments are bfloat16 between two updates.

The arithmetic is float32, on a part of a parameter at a time, so that no copy of a whole moment exists. The moments are
rounded stochastically: to nearest, a second moment with β₂ = 0.999 would never fall, because a change of 0.1 % is less than
half of bfloat16's last place. The random bits follow from the number of the update and the parameter's index, so a run that is
resumed or replayed gets the same ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

PART_NUMEL = 1 << 22
"""Elements of a parameter that are updated at a time."""

MOMENTS = ("exp_avg", "exp_avg_sq")


class Bfloat16AdamW(torch.optim.AdamW):
    """torch's AdamW with another `step`. Its state has the same entries, so checkpoints have the same form."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.register_load_state_dict_post_hook(_in_bfloat16)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        if closure is not None:
            raise ValueError("an update has no closure here")
        index = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                index += 1
                if parameter.grad is not None:
                    self._update(parameter, group, index)
        return None

    def _update(self, parameter: Tensor, group: dict[str, Any], index: int) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in MOMENTS:
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        update = int(state["step"].item())
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{index}/{update}".encode()))
        whole = [_local(each) for each in (parameter, parameter.grad, *(state[name] for name in MOMENTS))]
        for parts in zip(*(torch.split(each.view(-1), PART_NUMEL) for each in whole), strict=True):
            _update_part(*parts, group=group, update=update, generator=generator)


def _update_part(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    group: dict[str, Any],
    update: int,
    generator: torch.Generator,
) -> None:
    """Update a part of a parameter and of its moments, all [n], in place."""
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    gradient = gradient.float()
    mean32 = mean.float().lerp_(gradient, 1 - beta1)
    square32 = square.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    parameter.mul_(1 - lr * group["weight_decay"])
    denominator = square32.sqrt().div_((1 - beta2**update) ** 0.5).add_(group["eps"])
    parameter.addcdiv_(mean32, denominator, value=-lr / (1 - beta1**update))
    mean.copy_(rounded(mean32, generator))
    square.copy_(rounded(square32, generator))


def rounded(values: Tensor, generator: torch.Generator) -> Tensor:
    """Return float32 `values` in bfloat16, each rounded up or down by chance so that its expectation is the value.

    A bfloat16 is the upper half of a float32: a random number below 2¹⁶ is added to the lower half, which is then cut off.
    """
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    return (bits + noise).bitwise_and_(-(1 << 16)).view(torch.float32).to(torch.bfloat16)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _in_bfloat16(optimizer: torch.optim.Optimizer) -> None:
    """Convert loaded moments back: torch loads them in the parameter's type, which holds every bfloat16 exactly."""
    for state in optimizer.state.values():
        for name in MOMENTS:
            if name in state:
                state[name] = state[name].to(torch.bfloat16)

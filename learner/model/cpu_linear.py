"""Linear layers that train through oneDNN's float32 products where those are faster (`paceline.host.onednn`).

Promise: the same values and gradients as `nn.Linear`'s, forward and backward by the same kernel. Where oneDNN does not
help this module does nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.host.onednn import is_faster, product


def use_onednn_linear(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give every float32 `nn.Linear` of the model a forward through oneDNN, if this machine gains by it."""
    if not is_faster(device, dtype):
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(_linear, module)  # type: ignore[method-assign]


def _linear(module: nn.Linear, inputs: Tensor) -> Tensor:
    if (
        not inputs.dtype == module.weight.dtype == torch.float32
    ):  # cast after loading: few CPUs have such a kernel in oneDNN
        return nn.functional.linear(inputs, module.weight, module.bias)
    out: Tensor = _OneDnnProduct.apply(inputs, module.weight)  # type: ignore[no-untyped-call]
    return out if module.bias is None else out + module.bias


class _OneDnnProduct(torch.autograd.Function):
    """y = x·Wᵀ; ∂x = g·W, ∂W = gᵀ·x, each by the same kernel."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight_OI)
        return product(inputs, weight_OI)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        inputs, weight_OI = ctx.saved_tensors
        (grad,) = grads
        grad_inputs = product(grad, weight_OI.T) if ctx.needs_input_grad[0] else None
        grad_weight_OI = None
        if ctx.needs_input_grad[1]:
            grad_weight_OI = _outer(grad.flatten(0, -2), inputs.flatten(0, -2))
        return grad_inputs, grad_weight_OI


def _outer(left_NO: Tensor, right_NI: Tensor) -> Tensor:
    """Return [O, I] leftᵀ·right. The kernel copies a transposed first operand but not a second, so the narrower one is first."""
    if left_NO.shape[1] > right_NI.shape[1]:
        return product(right_NI.T, left_NO.T).T
    return product(left_NO.T, right_NI.T)

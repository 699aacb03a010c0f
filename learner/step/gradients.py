"""Gradients between the backward pass and the optimizer: reduction over ranks, norm, clipping."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def set_gradient_sync(model: nn.Module, device: torch.device, is_last: bool) -> None:
    """Set up the backward pass of a micro-batch. On CPUs, gradients are reduced and parameters freed once per update, because
    each collective costs more than the memory that it saves; on GPUs every backward pass reduces, so that no rank holds a
    full gradient."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(is_last)
        if device.type == "cpu":
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last)


def gradient_norm(model: nn.Module) -> float:
    """Return the global norm; the same number on every rank, so every rank takes the same branch on it."""
    norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return float((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())


def clip_gradients(model: nn.Module, max_norm: float, norm: float) -> None:
    """Scale the gradients, whose global norm is `norm`, to at most `max_norm`."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    if parameters:
        clip_grads_with_norm_(parameters, max_norm, torch.tensor(norm, device=parameters[0].device))

"""Operations of torch that give the same bits each time, where it has such ones (`policy.deterministic`)."""

from __future__ import annotations

import os

import torch
from torch import Tensor

WORKSPACE_VARIABLE, WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""cuBLAS repeats its sums only with a workspace of its own for each stream; it reads the variable at its first product."""


def reserve_workspace() -> None:
    """Let cuBLAS have the workspace that repeatable products need; a variable that is set stays. Call it before the first
    product on a GPU."""
    os.environ.setdefault(WORKSPACE_VARIABLE, WORKSPACE)


def use_deterministic_operations(wanted: bool) -> None:
    """Choose for this process. An operation without a deterministic version runs as it is, with a warning that names it."""
    torch.use_deterministic_algorithms(wanted, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = wanted
    torch.backends.cudnn.benchmark = False


def repeat_backward(out: Tensor) -> Tensor:
    """Return `out`, the result of an attention kernel whose backward pass is deterministic from now on, if this process wants
    deterministic operations. ATen's kernels (native/transformers/cuda/attention_backward.cu) have such a pass, and take it only
    without `warn_only`, which elsewhere lets operations run that have no deterministic version."""
    if out.grad_fn is not None and torch.are_deterministic_algorithms_enabled():
        out.grad_fn.register_prehook(lambda _: torch.use_deterministic_algorithms(True))
        out.grad_fn.register_hook(lambda *_: torch.use_deterministic_algorithms(True, warn_only=True))
    return out

"""Makes torch use deterministic operations, where it has them (`policy.deterministic`)."""

from __future__ import annotations

import os

import torch
from torch import Tensor

WORKSPACE_VARIABLE, WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""Variable and value that give each stream a separate workspace; without it cuBLAS does not repeat sums. cuBLAS reads
the variable at the first product."""


def reserve_workspace() -> None:
    """Set the cuBLAS workspace for repeatable products, unless it is set. Call it before the first product on a GPU."""
    os.environ.setdefault(WORKSPACE_VARIABLE, WORKSPACE)


def use_deterministic_operations(enabled: bool) -> None:
    """Set whether this process uses deterministic operations; an operation without such a version runs with a
    warning."""
    torch.use_deterministic_algorithms(enabled, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = enabled
    torch.backends.cudnn.benchmark = False


def repeat_backward(out: Tensor) -> Tensor:
    """Return `out`, an attention kernel's result, and make its backward pass deterministic if this process uses
    deterministic operations: ATen's kernels (native/transformers/cuda/attention_backward.cu) choose such a pass only if
    `warn_only` is off, but this process needs `warn_only` for other operations that have no deterministic version."""
    if out.grad_fn is not None and torch.are_deterministic_algorithms_enabled():
        out.grad_fn.register_prehook(lambda _: torch.use_deterministic_algorithms(True))
        out.grad_fn.register_hook(lambda *_: torch.use_deterministic_algorithms(True, warn_only=True))
    return out

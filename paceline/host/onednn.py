"""Float32 matrix products on x86 CPUs through oneDNN instead of the BLAS that PyTorch was built with.

Promise: the same float32 product, about twice as fast. PyTorch sends float32 matrix products to MKL, which on AMD
processors leaves AVX-512 unused: measured on one Zen core, shapes of a small transformer and 64 rows or more,
110 GFLOP/s against 200 to 260 by oneDNN. Learner and native engine both use it, each in its own layers.

oneDNN generates code for every shape that it meets, and PyTorch keeps what it made of each as well: 1,024 shapes each,
about half a megabyte a shape. Packed rows have ever new lengths, so a process that computes here calls `bound_caches`.
"""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


CACHED_SHAPES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": 128, "LRU_CACHE_CAPACITY": 32}
"""Shapes that oneDNN and PyTorch keep code and descriptors for, by the name of their environment variables. One pass over a
model meets about 20, whatever its depth."""


def bound_caches() -> None:
    """Bound the memory that products of ever new shapes take. Call it before the first product, because both libraries read
    their capacity then. Variables that are already set stay."""
    for name, shapes in CACHED_SHAPES.items():
        os.environ.setdefault(name, str(shapes))


def is_faster(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `product` is the faster way for tensors of this kind: float32 on an x86 CPU."""
    import torch

    on_x86 = platform.machine().lower() in ("x86_64", "amd64")
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return device.type == "cpu" and dtype == torch.float32 and on_x86 and bool(has_onednn)


def product(x: Tensor, weight_OI: Tensor) -> Tensor:
    """x·Wᵀ over the last axis of x, without a gradient."""
    import torch

    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_OI, None, "none", [], "")
    return out

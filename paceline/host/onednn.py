"""Multiplies float32 matrices on x86 CPUs with oneDNN instead of the BLAS that PyTorch was built with.

Promise: the same float32 product, about twice as fast. PyTorch uses MKL, which leaves AVX-512 unused on AMD processors:
measured on one Zen core, with shapes of a small transformer and 64 rows or more, 110 GFLOP/s against 200 to 260 with
oneDNN. Learner and native engine both use it, each in its own layers.

oneDNN caches generated code by shape, and PyTorch caches descriptors by shape: by default 1,024 shapes each, about half
a megabyte a shape. The lengths of packed sequences keep changing, so a process that computes with oneDNN calls
`bound_caches`.
"""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


CACHED_SHAPES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": 128, "LRU_CACHE_CAPACITY": 32}
"""Maps the variable of a cache (of oneDNN, of PyTorch) to its largest number of shapes; a model has about 20."""


def bound_caches() -> None:
    """Bound the caches of oneDNN and PyTorch; call it before the first product, when both libraries read their
    capacity. Variables that are already set stay."""
    for name, shapes in CACHED_SHAPES.items():
        os.environ.setdefault(name, str(shapes))


def is_faster(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `product` is faster for tensors of this kind: float32 on an x86 CPU."""
    import torch

    on_x86 = platform.machine().lower() in ("x86_64", "amd64")
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return device.type == "cpu" and dtype == torch.float32 and on_x86 and bool(has_onednn)


def product(x: Tensor, weight_OI: Tensor) -> Tensor:
    """Return x·Wᵀ over the last axis of x, without a gradient."""
    import torch

    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_OI, None, "none", [], "")
    return out

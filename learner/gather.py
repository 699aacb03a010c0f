"""Gathering the model's weights on rank 0, as a copy that later optimizer steps do not touch.

The promise: every rank goes through the same tensors in the same order and finishes each before the next, so no gather
is ever left half-done behind another collective; only rank 0 keeps anything. Names are those of the Hugging Face model,
whatever wraps its modules here, and tied weights appear under each of their names but exist once.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paceline.flat_weights import empty_flat, views
from paceline.weights import TensorPlan, WeightManifest

WRAPPER_PARTS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""What wrappers put into state-dict names; the model that receives the weights has none of them."""


def gather_weights(model: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The whole state dict on rank 0, in host memory (pinned when the model is on a GPU); empty on other ranks.

    A collective call: all ranks of the model's mesh must make it at the same point. Floating-point tensors are
    converted to `dtype` (None keeps theirs) before they travel. The tensors are views of one allocation, laid out as
    `paceline.flat_weights.plan` does, so a publisher sends them without another copy.
    """
    tensors = named_weights(model)
    wanted = is_first_rank()
    gathered: dict[str, torch.Tensor] = {}
    if wanted:
        gathered = _allocate(tensors, dtype)
    done: set[int] = set()
    for name, tensor in tensors.items():
        if id(tensor) in done:
            continue
        done.add(id(tensor))
        whole = _whole(tensor.detach(), dtype)
        if wanted:
            gathered[name].copy_(whole)
        del whole
    return gathered


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by their unwrapped names; tied names give the identical object."""
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    return {unwrapped(name): tensor for name, tensor in state.items()}


def unwrapped(name: str) -> str:
    """A state-dict name without the parts that wrappers add."""
    for part in WRAPPER_PARTS:
        name = name.replace(part, "")
    return name


def is_first_rank() -> bool:
    """Whether this process keeps what is gathered: rank 0, or the only process."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _whole(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)  # before the gather: half the bytes on the wire
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor


def _allocate(tensors: dict[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    names: dict[int, str] = {}
    plans = []
    on_gpu = False
    for name, tensor in tensors.items():
        wire = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        first = names.setdefault(id(tensor), name)
        plans.append(
            TensorPlan(
                name,
                str(wire).removeprefix("torch."),
                tuple(tensor.shape),
                first if first != name else None,
            )
        )
        on_gpu = on_gpu or tensor.is_cuda
    layout = WeightManifest.plan(plans, bucket_bytes=1 << 28)
    flat = empty_flat(layout)
    if on_gpu:
        flat = flat.pin_memory()
    flat.zero_()
    return views(flat, layout)

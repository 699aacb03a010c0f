"""Packs a version's tensors into one flat run of bytes, unpacks them as views (never copies), and makes checksums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.errors import WireError
from paceline.weights.format.manifest import TensorPlan, WeightManifest, checksum

if TYPE_CHECKING:
    import torch


def plan(tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> WeightManifest:
    """Return the layout of `tensors` in their order, without checksums; names that share memory share one offset."""
    first_names: dict[tuple[int, torch.dtype, torch.Size], str] = {}
    plans = []
    for name, tensor in tensors.items():
        same_as = None
        if tensor.numel():
            same_as = first_names.setdefault((tensor.data_ptr(), tensor.dtype, tensor.shape), name)
        plans.append(
            TensorPlan(
                name,
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
                None if same_as == name else same_as,
            )
        )
    return WeightManifest.plan(plans, bucket_bytes)


def check_fits(size_bytes: int) -> None:
    """Raise WireError for a version that is larger than this host's whole memory."""
    import psutil

    memory_bytes = psutil.virtual_memory().total
    if size_bytes > memory_bytes:
        raise WireError(f"a version of {size_bytes} bytes is offered, but this host has {memory_bytes} bytes of memory")


def empty_flat(manifest: WeightManifest) -> torch.Tensor:
    """Return [total_bytes] uint8 in host memory, not initialised."""
    import torch

    return torch.empty(manifest.total_bytes, dtype=torch.uint8)


def views(flat: torch.Tensor, manifest: WeightManifest) -> dict[str, torch.Tensor]:
    """Return every tensor of the manifest as a view of `flat` ([total_bytes] uint8); tied ones share their bytes."""
    import torch

    tensors = {}
    for entry in manifest.entries:
        raw = flat[entry.offset : entry.offset + entry.num_bytes]
        tensors[entry.name] = raw.view(getattr(torch, entry.dtype)).view(entry.shape)
    return tensors


def checksums(flat: torch.Tensor, manifest: WeightManifest) -> dict[str, str]:
    """Return a mapping from tensor name to hex digest of the tensor's bytes in `flat`; shared ones are read once."""
    by_location: dict[tuple[int, int], str] = {}
    sums = {}
    for entry in manifest.entries:
        location = (entry.offset, entry.offset + entry.num_bytes)
        if location not in by_location:
            by_location[location] = checksum(flat[slice(*location)].cpu().numpy(), manifest.algorithm)
        sums[entry.name] = by_location[location]
    return sums

"""Tensors of a version as the flat run of bytes that its manifest describes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.weights.format.manifest import WeightManifest
from paceline.weights.format.packing import empty_flat, views


def pack(tensors: Mapping[str, torch.Tensor], manifest: WeightManifest) -> torch.Tensor:
    """Return [total_bytes] uint8, zeros between the tensors."""
    flat = empty_flat(manifest).zero_()
    for name, view in views(flat, manifest).items():
        view.copy_(tensors[name])
    return flat

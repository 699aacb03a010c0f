"""What a step reached: tokens and operations a second, and the part of the GPU that was used."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.models.work import peak_flops


def pace(metrics: Mapping[str, float], ranks: int, device: torch.device) -> dict[str, float]:
    """Return the metrics of the pace, from those of the step on `ranks` ranks."""
    reached = {"learner/tokens_per_s": metrics["tokens"] / metrics["step_s"]}
    if "teraflop" not in metrics:
        return reached
    reached["learner/teraflops"] = metrics["teraflop"] / metrics["step_s"] / ranks
    if device.type == "cuda":
        reached["learner/peak_gpu_memory_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        peak = peak_flops(torch.cuda.get_device_name(device))
        if peak is not None:
            reached["learner/mfu"] = reached["learner/teraflops"] * 1e12 / peak
    return reached

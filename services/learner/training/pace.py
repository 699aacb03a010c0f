"""What a step reached: tokens and operations a second, and the part of the GPU that was used.

Time of a step in which its collectives ran, from torch's profiler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.profiler import ProfilerActivity, profile

from paceline.models.shape import peak_flops


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


Interval = tuple[float, float]


@contextlib.contextmanager
def collective_time(wanted: bool, device: torch.device) -> Iterator[dict[str, float]]:
    """Yield a dict that has the metrics of the block once it has ended; nothing is profiled unless `wanted`.

    `learner/collectives_s` counts a moment once, however many collectives run in it. On GPUs `learner/exposed_collectives_s` is the
    part in which the GPU computed nothing else.
    """
    metrics: dict[str, float] = {}
    if not wanted:
        yield metrics
        return
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        yield metrics
        if on_gpu:
            torch.cuda.synchronize(device)
    events = [
        (event.name, event.device_type.name == "CUDA", (event.time_range.start, event.time_range.end))
        for event in profiler.events() or ()
    ]
    if not on_gpu:
        collectives = [interval for name, _, interval in events if name.startswith("gloo:")]
        metrics["learner/collectives_s"] = covered(collectives) / 1e6
        return
    kernels = [(name, interval) for name, is_kernel, interval in events if is_kernel]
    if not kernels:  # the driver does not let this user profile; nothing is known then
        return
    collectives = [interval for name, interval in kernels if name.startswith("nccl")]
    arithmetic = [interval for name, interval in kernels if not name.startswith("nccl")]
    everything = covered(collectives + arithmetic)
    metrics["learner/collectives_s"] = covered(collectives) / 1e6
    metrics["learner/exposed_collectives_s"] = (everything - covered(arithmetic)) / 1e6


def covered(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total

"""Time in collectives: of two real ranks, and of a GPU's kernels as the profiler lists them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from ranks import run_ranks

from paceline.services.learner.training.run_reports import collective_metrics, collective_time, covered


def test_the_wait_for_another_rank_is_time_in_a_collective(tmp_path: Path) -> None:
    run_ranks("profiled_rank.py", 2, tmp_path / "metrics.json")
    waiting, alone = json.loads((tmp_path / "metrics.json").read_text())
    assert waiting.keys() == alone.keys() == {"learner/collectives_s"}
    assert waiting["learner/collectives_s"] > 0.2
    assert alone["learner/collectives_s"] == 0.0


def test_nothing_is_profiled_unless_it_is_wanted() -> None:
    with collective_time(False, torch.device("cpu")) as metrics:
        assert not torch.autograd._profiler_enabled()
    assert metrics == {}


def event(name: str, kind: str, start_us: int, end_us: int) -> Any:
    interval = SimpleNamespace(start=start_us, end=end_us)
    return SimpleNamespace(name=name, device_type=SimpleNamespace(name=kind), time_range=interval)


def test_a_gpus_collectives_are_exposed_where_nothing_else_runs() -> None:
    gpu, cpu = "CUDA", "CPU"
    events = [
        event("nccl:all_gather", cpu, 0, 9_000_000),
        event("aten::mm", cpu, 0, 9_000_000),
        event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)", gpu, 0, 3_000_000),
        event("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", gpu, 2_000_000, 5_000_000),
        event("sm90_xmma_gemm_bf16", gpu, 1_000_000, 2_500_000),
        event("sm90_xmma_gemm_bf16", gpu, 6_000_000, 7_000_000),
    ]
    metrics = collective_metrics(events, on_gpu=True)
    assert metrics == {"learner/collectives_s": 5.0, "learner/exposed_collectives_s": 3.5}


def test_a_gpu_that_may_not_be_profiled_has_no_metrics() -> None:
    assert collective_metrics([], on_gpu=True) == {}


def test_overlaps_count_once() -> None:
    assert covered([]) == 0
    assert covered([(5, 7), (0, 2), (1, 3), (1.5, 2.5), (6, 6.5)]) == 5

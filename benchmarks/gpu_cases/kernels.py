"""Measures the card's peak rates, and a step's two heaviest parts: attention over packed rows, and the LM head."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_cases.training import mixed_lengths, seconds
from paceline.host.page_lock import PageLocks
from paceline.learner.batch.samples import SequenceLayout
from paceline.learner.model.attention import _by_runs, _flash, prefer_flash_attention_3
from paceline.learner.model.logprobs import chunked_logprobs
from paceline.weights.hosts.segment import HostSegment

HEADS, KEY_VALUE_HEADS, HEAD_DIM = 32, 8, 128
"""Of Qwen3 8B."""


def timed(function: Callable[[], Any], device: torch.device, repeat: int = 5) -> float:
    """Return the median seconds of a call, after two that warm up."""
    taken_s = []
    for _ in range(repeat + 2):
        with seconds(device) as took:
            function()
        taken_s.append(took[0])
    return statistics.median(taken_s[2:])


def ceilings(device: torch.device, size: int) -> dict[str, Any]:
    """Measure the products of bfloat16 matrices [size, size], copies within the card and over its bus, and the locking of pages."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(64 * size * size // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * len(source) / timed(lambda: target.copy_(source), device)
    found = {
        "bf16_teraflops": 2 * size**3 / timed(lambda: left @ right, device) / 1e12,
        "copy_gb_per_s": copied / 1e9,
        "bus_gb_per_s": bus_speed(device, 4 * size * size) / 1e9,
        "from_pageable_gb_per_s": bus_speed(device, 4 * size * size, locked=False) / 1e9,
    }
    return found | (page_locks(device, 4 * size * size) if device.type == "cuda" else {})


def bus_speed(device: torch.device, size_bytes: int = 1 << 28, *, locked: bool = True) -> float:
    """Return the bytes per second of a copy from host memory to the device."""
    source = torch.ones(size_bytes, dtype=torch.uint8, pin_memory=locked and device.type == "cuda")
    target = torch.ones_like(source, device=device)
    return size_bytes / timed(lambda: target.copy_(source), device, 3)


def page_locks(device: torch.device, size_bytes: int) -> dict[str, Any]:
    """Lock a segment's pages, copy from it, and let CUDA refuse to lock the same pages for another segment's mapping; the next
    kernel must run."""
    segment = HostSegment.create(size_bytes, size_bytes)
    segment.flat().fill_(1)
    with seconds(device) as locking:
        locked_bytes = segment.page_lock()
    target = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    speed = size_bytes / timed(lambda: target.copy_(segment.flat(), non_blocking=True), device, 3)
    address, again = segment.flat().data_ptr(), PageLocks()
    again.lock([(address, address + size_bytes)])
    (torch.ones(8, device=device) + 1).sum().item()
    return {
        "locked_bytes": locked_bytes,
        "lock_gb_per_s": size_bytes / locking[0] / 1e9,
        "from_locked_segment_gb_per_s": speed / 1e9,
        "second_lock_is_refused": again.num_bytes == 0,
    }


def attention(device: torch.device, tokens: int) -> dict[str, Any]:
    """Run forward and backward of packed attention by both paths, and compare flash attention with float32."""
    found: dict[str, Any] = {"flash_attention_3": prefer_flash_attention_3(device)}
    rows = {"mixed": mixed_lengths(tokens, 0), "one of four times the tokens": [4 * tokens]}
    paths = {"flash": _flash, "runs": _runs} if device.type == "cuda" else {"runs": _runs}
    for name, lengths in rows.items():
        for path, attend in paths.items():
            found[f"{name}, {path}"] = _pace(attend, lengths, None, device)
    for path, attend in paths.items():
        found[f"mixed, {path}, window"] = _pace(attend, rows["mixed"], tokens // 8, device)
    for window in (None, 100) if device.type == "cuda" else ():
        found[f"relative error of out, dq, dk, dv, window {window}"] = _error(window, device)
    return found


def _runs(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, scale: None, window: int | None) -> Tensor:
    return _by_runs(q, k, v, layout, scale, window, None)


def _pace(
    attend: Callable[..., Tensor], lengths: list[int], window: int | None, device: torch.device
) -> dict[str, float]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layout, inputs = SequenceLayout.of(lengths, device), _heads(sum(lengths), dtype, device)
    gradient = torch.randn(1, sum(lengths), HEADS, HEAD_DIM, device=device, dtype=dtype)
    taken_s = timed(lambda: attend(*inputs, layout, None, window).backward(gradient), device)  # type: ignore[no-untyped-call]
    # Of each token and one that it attends to: 4·D operations of products forward, 10·D backward, which computes the scores again.
    pairs = sum(min(at + 1, window or length) for length in lengths for at in range(length))
    return {"ms": 1e3 * taken_s, "teraflops": 14 * HEAD_DIM * HEADS * pairs / taken_s / 1e12}


def _error(window: int | None, device: torch.device) -> list[float]:
    lengths = [700, 300, 300, 129, 64, 1]
    layout, inputs = SequenceLayout.of(lengths, device), _heads(sum(lengths), torch.bfloat16, device)
    gradient = torch.randn(1, sum(lengths), HEADS, HEAD_DIM, device=device)
    results = []
    for attend, dtype in ((_flash, torch.bfloat16), (_runs, torch.float32)):
        leaves = [each.detach().to(dtype).requires_grad_() for each in inputs]
        out = attend(*leaves, layout, None, window)
        out.backward(gradient.to(dtype))  # type: ignore[no-untyped-call]
        results.append([out.detach().float(), *(leaf.grad.float() for leaf in leaves if leaf.grad is not None)])
    return [((half - exact).norm() / exact.norm()).item() for half, exact in zip(*results, strict=True)]


def _heads(tokens: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    return [
        torch.randn(1, heads, tokens, HEAD_DIM, device=device, dtype=dtype, requires_grad=True)
        for heads in (HEADS, KEY_VALUE_HEADS, KEY_VALUE_HEADS)
    ]


def head(device: torch.device, tokens: int, hidden: int, vocabulary: int) -> dict[str, Any]:
    """Run forward and backward of the LM head in chunks, and by whole logits: milliseconds, TFLOP/s of three products, memory."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden_NH = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    weight_VH = (torch.randn(vocabulary, hidden, device=device) * 0.02).to(dtype).requires_grad_()
    targets_N = torch.randint(vocabulary, (tokens,), device=device)

    def chunked(chunk_tokens: int, **settings: bool) -> Tensor:
        found = chunked_logprobs(
            hidden_NH, weight_VH, targets_N, temperature=1.0, chunk_tokens=chunk_tokens, **settings
        )
        return -found[0].sum()

    def whole() -> Tensor:
        return torch.nn.functional.cross_entropy((hidden_NH @ weight_VH.T).float(), targets_N, reduction="sum")

    losses: dict[str, Callable[[], Tensor]] = {
        f"chunks of {size}": lambda size=size: chunked(size) for size in (tokens // 8, tokens // 2)
    }
    losses |= {
        "without entropy": lambda: chunked(tokens // 8, with_entropy=False),
        "float32_head": lambda: chunked(tokens // 8, float32_head=True),
        "whole logits": whole,
    }
    found: dict[str, Any] = {}
    for name, loss in losses.items():

        def both(loss: Callable[[], Tensor] = loss) -> None:
            hidden_NH.grad = weight_VH.grad = None
            loss().backward()  # type: ignore[no-untyped-call]

        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        taken_s = timed(both, device)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        flops = 6 * math.prod((tokens, hidden, vocabulary))
        found[name] = {"ms": 1e3 * taken_s, "teraflops": flops / taken_s / 1e12, "peak_gb": peak / 1e9}
    return found

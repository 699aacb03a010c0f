"""Peak memory of the LM head's log-probabilities, entropies and gradients, by vocabulary and tokens.

    python benchmarks/head.py [--vocabularies 16384,65536,151936] [--tokens 1024,4096,16384] [--hidden 64] [--json]

Forward and backward of `paceline.learner.model.logprobs.chunked_logprobs` in float32, and of the plain way (log_softmax of all
logits) where its logits have at most 2^26 elements. The megabytes are the peak above the inputs, without the two gradients
that are the result: on a CPU the process's resident memory, on a GPU the allocator's.

Recorded results: docs/operate/performance.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from short_form import parse
from torch import Tensor

from paceline.learner.model.logprobs import chunked_logprobs

PLAIN_LOGITS = 1 << 26
"""Most logits of which the plain way is measured: it takes some 20 bytes for each."""
STATUS = Path("/proc/self/status")
Head = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def tiled(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies as the learner does."""
    return chunked_logprobs(hidden_NH, weight_VH, targets_N, temperature=1.0, chunk_tokens=1024, entropy_gradient=True)


def plain(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same from all logits."""
    logp_NV = (hidden_NH @ weight_VH.T).log_softmax(-1)
    return logp_NV.gather(-1, targets_N[:, None])[:, 0], -(logp_NV.exp() * logp_NV).sum(-1)


def measure(head: Head, vocabulary: int, tokens: int, hidden: int, device: torch.device) -> dict[str, float]:
    """Return the peak in MB and the CPU seconds of one forward and backward."""
    torch.manual_seed(0)
    hidden_NH = torch.randn(tokens, hidden, device=device, requires_grad=True)
    weight_VH = (torch.randn(vocabulary, hidden, device=device) * 0.1).requires_grad_()
    targets_N = torch.randint(vocabulary, (tokens,), device=device)
    before = start_peak(device)
    begin = time.process_time()
    logprobs_N, entropy_N = head(hidden_NH, weight_VH, targets_N)
    (logprobs_N.sum() + entropy_N.sum()).backward()
    seconds = time.process_time() - begin
    results = 4 * hidden * (tokens + vocabulary)
    return {"mb": max(0.0, (peak(device) - before - results) / 1e6), "cpu_s": seconds}


def start_peak(device: torch.device) -> int:
    """Set the recorded peak back, and return the bytes in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def peak(device: torch.device) -> int:
    """Return the most bytes in use since `start_peak`."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else status_bytes("VmHWM")


def status_bytes(name: str) -> int:
    """Return a number of this process's status."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Parses, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", default="16384,65536,151936")
    parser.add_argument("--tokens", default="1024,4096,16384")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    arguments = parse(parser, vocabularies="2048", tokens="256")
    device = torch.device(arguments.device)
    torch.set_num_threads(1)
    measure(tiled, 1024, 64, arguments.hidden, device)  # the libraries' own memory
    cells = []
    for vocabulary in map(int, arguments.vocabularies.split(",")):
        for tokens in map(int, arguments.tokens.split(",")):
            cell = {"vocabulary": vocabulary, "tokens": tokens, "logits_mb": 4e-6 * vocabulary * tokens}
            for name, head in (("tiled", tiled), ("plain", plain)):
                if head is tiled or vocabulary * tokens <= PLAIN_LOGITS:
                    found = measure(head, vocabulary, tokens, arguments.hidden, device)
                    cell |= {f"{name}_{key}": value for key, value in found.items()}
            cells.append(cell)
    machine = {
        "device": str(device),
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
    }
    if arguments.json:
        print(json.dumps({**machine, "hidden": arguments.hidden, "cells": cells}))
        return
    print(machine)
    print(f"{'vocabulary':>10} {'tokens':>8} {'all logits, MB':>15} {'tiled, MB':>10} {'plain, MB':>10}")
    for cell in cells:
        plain_mb = f"{cell['plain_mb']:10.0f}" if "plain_mb" in cell else f"{'-':>10}"
        print(
            f"{cell['vocabulary']:10} {cell['tokens']:8} {cell['logits_mb']:15.0f} {cell['tiled_mb']:10.0f} {plain_mb}"
        )


if __name__ == "__main__":
    main()

"""Processors by name: memory, and what they reach in generation and training.

Peaks are those of NVIDIA's data sheets (dense bfloat16, without sparsity). What part of a peak this code reaches is marked with
where and when it was measured; nothing was measured on GPUs yet, so theirs are usual values of well-tuned engines and learners.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.apps.planning.rates import Rates
from paceline.errors import InvalidInput

TRAINING_SHARE = 0.40
"""Part of the peak operations that a learner on GPUs is taken to reach. Unmeasured."""

DECODING_SHARE = 0.60
"""Part of the memory's bandwidth that decoding is taken to reach. Unmeasured."""

PREFILL_SHARE = 0.50
"""Part of the peak operations that generation is taken to reach where operations limit it. Unmeasured."""

LAUNCH_S = 5e-6
"""Seconds of a decoder layer in a step of decoding beside its roofline, with CUDA graphs. Unmeasured."""

STATE_BYTES_MOVED = 32
"""Bytes that an AdamW step reads and writes for each parameter: weight, gradient and two moments in float32."""

UNMEASURED = "unmeasured"


@dataclass(frozen=True)
class Processor:
    """One GPU, or one core of a CPU."""

    name: str
    memory_bytes: int | None
    """None: the memory is the host's, and is not divided."""
    generation: Rates
    training: Rates
    measured: str
    """Where and when its rates were measured; `unmeasured` for assumed ones."""

    @property
    def is_gpu(self) -> bool:
        """Return whether it has a memory of its own."""
        return self.memory_bytes is not None


def _gpu(name: str, memory_gb: float, teraflops: float, terabytes_per_s: float) -> Processor:
    bandwidth = terabytes_per_s * 1e12
    generation = Rates(
        PREFILL_SHARE * teraflops * 1e12, DECODING_SHARE * bandwidth, {"layer_steps": LAUNCH_S}
    )
    optimizer_s = STATE_BYTES_MOVED / (DECODING_SHARE * bandwidth)
    training = Rates(TRAINING_SHARE * teraflops * 1e12, each_s={"parameters": optimizer_s})
    return Processor(name, int(memory_gb * 1e9), generation, training, UNMEASURED)


CPU_CORE = Processor(
    "cpu",
    None,
    Rates(
        1 / 1.407e-11,
        each_s={"layer_steps": 7.21e-4, "tokens": 2.62e-6, "logits": 5.42e-9, "cache": 1.146e-9},
        width=4,
    ),
    Rates(
        1 / 1.214e-11,
        each_s={"logits": 1.097e-8, "parameters": 2.75e-9, "token_layers": 7.78e-6},
        width=4,
    ),
    "measured by benchmarks/capacity.py on a core of an AMD EPYC (virtual) with nothing beside it, 2026-11-25",
)
"""One core, for models of up to some million parameters in float32: fitted by `benchmarks/capacity.py --calibrate`."""

PROCESSORS = {
    processor.name: processor
    for processor in (
        _gpu("h100", 80, 989, 3.35),
        _gpu("h200", 141, 989, 4.8),
        _gpu("b200", 180, 2250, 8.0),
        _gpu("a100", 80, 312, 2.04),
        _gpu("a100-40", 40, 312, 1.56),
        _gpu("l40s", 48, 362, 0.864),
        _gpu("l4", 24, 121, 0.3),
        CPU_CORE,
    )
}

MOST = 1 << 20


def read_gpus(text: str) -> tuple[Processor, int]:
    """Return processor and number of NAME:NUMBER. Raises InvalidInput with the names that there are."""
    match = re.fullmatch(r"([A-Za-z0-9-]+)(?::(\d{1,7}))?", text)
    processor = PROCESSORS.get(match[1].lower()) if match else None
    number = int(match[2] or 1) if match else 0
    if processor is None or not 1 <= number <= MOST:
        raise InvalidInput(
            f"--gpus {text[:80]!r} has to be NAME:NUMBER, such as h100:64, of {', '.join(PROCESSORS)}"
        )
    return processor, number

"""Describes processors by name: memory, and rates that they reach in generation and training. Pure.

Peaks are from NVIDIA's data sheets (dense bfloat16, without sparsity). The share of a peak that this code reaches is
given with the place and date of its measurement. The shares of GPUs are not measured: they are usual values of
well-tuned software.

Seconds follow a roofline, with overheads by their number:
seconds = max(operations / flops_per_s, bytes / bytes_per_s) + Σ number × seconds each

A decode step computes 2 operations for each weight and sequence. It reads every weight once for all sequences, and keys
and values for each sequence (Pope et al. 2022, arXiv 2211.05102, section 2). `paceline/models/shape.py` counts the
operations of training.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.errors import InvalidInput
from paceline.models.shape import ModelShape, training_flops

Terms = dict[str, float]


@dataclass(frozen=True)
class Rates:
    """The rates of a processor for one kind of work."""

    flops_per_s: float
    bytes_per_s: float = math.inf
    each_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds for each of the overheads that `generation_terms` and `training_terms` count."""
    width: int = 2
    """Number of bytes of a weight, and of an element of keys and values."""

    def seconds(self, terms: Mapping[str, float]) -> float:
        roof_s = max(terms["flops"] / self.flops_per_s, terms.get("bytes", 0.0) / self.bytes_per_s)
        return roof_s + sum(terms[name] * each_s for name, each_s in self.each_s.items())


def active_parameters(shape: ModelShape) -> float:
    """Return the number of weights that a token passes through: with the head, without the embedding (a look-up)."""
    layer = 2 * shape.hidden * (shape.attention + shape.key_value) + 3 * shape.hidden * shape.mlp
    return shape.layers * layer + shape.embedding


def generation_terms(shape: ModelShape, work: Work, slots: float, width: int = 2) -> Terms:
    """Return the terms of sampling a batch, `slots` sequences at a time. The prompt of a group is computed once."""
    slots = max(1.0, min(slots, work.sequences))
    steps = work.sampled_tokens / slots
    context = work.prompt_tokens + work.completion_tokens / 2
    active = active_parameters(shape)
    read = min(shape.parameters, active * slots)
    prefill = work.groups * work.prompt_tokens * 2 * (active - shape.embedding)
    attention = 4 * shape.attention * shape.layers * context
    return {
        "flops": work.sampled_tokens * (2 * active + attention) + prefill,
        "bytes": width * (steps * read + work.sampled_tokens * context * 2 * shape.layers * shape.key_value),
        "layer_steps": steps * shape.layers,
        "tokens": work.sampled_tokens,
        "logits": work.sampled_tokens * shape.vocabulary,
        "cache": work.sampled_tokens * context * 2 * shape.layers * shape.key_value,
    }


def training_terms(shape: ModelShape, work: Work) -> Terms:
    """Return the terms of a training step on one rank."""
    length = round(work.prompt_tokens + work.completion_tokens)
    flops = training_flops(shape, [(work.sequences, length)], round(work.sampled_tokens))
    micro_batches = max(1, math.ceil(work.tokens / work.micro_batch_tokens))
    return {
        "flops": flops * (1 + work.recomputed / 3),
        "layer_batches": micro_batches * shape.layers,
        "logits": work.sampled_tokens * shape.vocabulary,
        "parameters": float(shape.parameters),
        "token_layers": work.tokens * shape.layers,
    }


def generation_seconds(shape: ModelShape, work: Work, rates: Rates, slots: float) -> float:
    return rates.seconds(generation_terms(shape, work, slots, rates.width))


def training_seconds(shape: ModelShape, work: Work, rates: Rates) -> float:
    return rates.seconds(training_terms(shape, work))


@dataclass(frozen=True)
class Work:
    """The batch of a step, with mean lengths."""

    groups: int
    """Number of groups, or of examples for a run on examples."""
    completions: int
    prompt_tokens: float
    completion_tokens: float
    micro_batch_tokens: int
    """Number of tokens in one forward and backward pass of a rank."""
    recomputed: float = 0.0
    """Share of the forward pass that the backward pass computes again."""

    @property
    def sequences(self) -> int:
        return self.groups * self.completions

    @property
    def sampled_tokens(self) -> float:
        """Return the number of completion tokens in the batch; all of them train."""
        return self.sequences * self.completion_tokens

    @property
    def tokens(self) -> float:
        """Return the number of tokens that pass through the learner."""
        return self.sequences * (self.prompt_tokens + self.completion_tokens)


TRAINING_SHARE = 0.40
"""Assumed share of the peak operations that a learner on GPUs reaches. Unmeasured."""

DECODING_SHARE = 0.60
"""Assumed share of the memory's bandwidth that decoding reaches. Unmeasured."""

PREFILL_SHARE = 0.50
"""Assumed share of the peak operations that generation reaches when operations limit it. Unmeasured."""

LAUNCH_S = 5e-6
"""Seconds that a decoder layer adds to its roofline time in a decoding step, with CUDA graphs. Unmeasured."""

STATE_BYTES_MOVED = 32
"""Bytes that an AdamW step moves for each parameter: weight, gradient and two moments in float32."""

UNMEASURED = "unmeasured"


@dataclass(frozen=True)
class Processor:
    """One GPU, or one core of a CPU."""

    name: str
    memory_bytes: int | None
    """Memory of the GPU in bytes. None for a core, which uses the host's memory undivided."""
    generation: Rates
    training: Rates
    measured: str
    """Place and date of the measurement; `unmeasured` for assumed rates."""

    @property
    def is_gpu(self) -> bool:
        """Return whether the processor has separate memory."""
        return self.memory_bytes is not None


def _gpu(name: str, memory_gb: float, teraflops: float, terabytes_per_s: float) -> Processor:
    bandwidth = terabytes_per_s * 1e12
    generation = Rates(PREFILL_SHARE * teraflops * 1e12, DECODING_SHARE * bandwidth, {"layer_steps": LAUNCH_S})
    optimizer_s = STATE_BYTES_MOVED / (DECODING_SHARE * bandwidth)
    training = Rates(TRAINING_SHARE * teraflops * 1e12, each_s={"parameters": optimizer_s})
    return Processor(name, int(memory_gb * 1e9), generation, training, UNMEASURED)


CPU_CORE = Processor(
    "cpu",
    None,
    Rates(
        1 / 1.407e-11, each_s={"layer_steps": 7.21e-4, "tokens": 2.62e-6, "logits": 5.42e-9, "cache": 1.146e-9}, width=4
    ),
    Rates(1 / 1.214e-11, each_s={"logits": 1.097e-8, "parameters": 2.75e-9, "token_layers": 7.78e-6}, width=4),
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
    """Return the processor and the number in NAME:NUMBER. Raises InvalidInput with the known names."""
    match = re.fullmatch(r"([A-Za-z0-9-]+)(?::(\d{1,7}))?", text)
    processor = PROCESSORS.get(match[1].lower()) if match else None
    number = int(match[2] or 1) if match else 0
    if processor is None or not 1 <= number <= MOST:
        raise InvalidInput(f"--gpus {text[:80]!r} must be NAME:NUMBER, such as h100:64, of {', '.join(PROCESSORS)}")
    return processor, number

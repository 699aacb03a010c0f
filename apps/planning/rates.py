"""Seconds of generation and training by a roofline: operations and bytes by rates, and overheads by their number. Pure.

    seconds = max(operations / flops_per_s, bytes / bytes_per_s) + Σ number × seconds each

Decoding computes 2 operations for each weight and sequence and reads every weight once a step, whatever the number of sequences;
keys and values are read for each (Pope et al. 2022, arXiv 2211.05102, section 2). Operations of training are those of
`paceline/models/shape.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.apps.planning.work import Work
from paceline.models.shape import ModelShape, training_flops

Terms = dict[str, float]


@dataclass(frozen=True)
class Rates:
    """What a processor reaches in one kind of work."""

    flops_per_s: float
    bytes_per_s: float = math.inf
    each_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds for each of the overheads that `generation_terms` and `training_terms` count."""
    width: int = 2
    """Bytes of a weight, and of an element of keys and values."""

    def seconds(self, terms: Mapping[str, float]) -> float:
        """Return the seconds of the work that the terms count."""
        roof_s = max(terms["flops"] / self.flops_per_s, terms.get("bytes", 0.0) / self.bytes_per_s)
        return roof_s + sum(terms[name] * each_s for name, each_s in self.each_s.items())


def active_parameters(shape: ModelShape) -> float:
    """Return the weights that a token passes through, the head included, without the embedding that is only looked up."""
    layer = 2 * shape.hidden * (shape.attention + shape.key_value) + 3 * shape.hidden * shape.mlp
    return shape.layers * layer + shape.embedding


def generation_terms(shape: ModelShape, work: Work, slots: float, width: int = 2) -> Terms:
    """Return what sampling a batch takes, `slots` sequences at a time. The prompt of a group is computed once."""
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
    """Return what a step of training takes, on one rank."""
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
    """Return the seconds in which one engine samples a batch."""
    return rates.seconds(generation_terms(shape, work, slots, rates.width))


def training_seconds(shape: ModelShape, work: Work, rates: Rates) -> float:
    """Return the seconds in which one rank trains a batch."""
    return rates.seconds(training_terms(shape, work))

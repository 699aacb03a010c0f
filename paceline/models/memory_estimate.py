"""Estimate of the memory that a run takes, from its spec and the model's config.json alone.

The figures are those of `docs/performance.md`, which measures them: parameters, gradients, moments, published weights and
key-value cache are exact to a few percent, activations to about a third. Nothing heavy is imported and nothing is loaded.

Suffixes: bytes are whole numbers, a GB is 10⁹ bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.models.loading import resolved_dtype
from paceline.spec import PolicySection, RunSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
PROCESS_BYTES = 500_000_000
"""A process with torch and transformers, before it loads a model."""

LOGITS_COPIES = 3
"""Arrays of a chunk's logits, in float32, that exist at one time."""

REMEDIES = (
    "policy.activation_checkpointing=true, policy.logprob_chunk_tokens=256, policy.optimizer.state_dtype=bfloat16, a smaller "
    "policy.train_mb_tokens or policy.lora_cfg.enabled=true take less"
)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer."""

    layers: int
    hidden: int
    mlp: int
    """Width of the MLP, of all experts that a token passes through together."""
    attention: int
    """Width of the queries of all heads."""
    key_value: int
    """Width of the keys of all heads."""
    vocabulary: int
    parameters: int
    adapted_rows: int
    """Σ (inputs + outputs) of all linear layers of the model below its head; times the rank it is a LoRA adapter's size."""


@dataclass(frozen=True)
class Estimate:
    """Bytes of each process, by purpose."""

    shape: ModelShape
    learner: Mapping[str, int]
    """Of one rank, without activations."""
    activations: int
    """Of a rank's full micro-batch, with the logits of a chunk."""
    micro_batch_tokens: int
    sampler: Mapping[str, int] = field(default_factory=dict)
    """Of one rollout worker with the native engine; empty for vLLM, which takes the share that it is given."""
    learner_on_gpu: bool = False
    sampler_on_gpu: bool = False

    @property
    def learner_bytes(self) -> int:
        """Bytes of a rank with a full micro-batch."""
        return sum(self.learner.values()) + self.activations

    @property
    def sampler_bytes(self) -> int:
        """Bytes of a rollout worker."""
        return sum(self.sampler.values())


def shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    """Return the sizes in a model's config.json; None where it has other keys than the usual ones."""
    text = config.get("text_config") or config
    try:
        layers, hidden, heads = (
            int(text[key]) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
        )
        vocabulary, dense = int(text["vocab_size"]), int(text["intermediate_size"])
        head = int(text.get("head_dim") or hidden // heads)
        attention, key_value = heads * head, int(text.get("num_key_value_heads") or heads) * head
        experts = int(text.get("num_experts") or text.get("num_local_experts") or 0)
        each = int(text.get("moe_intermediate_size") or dense)
        mlp = each * int(text.get("num_experts_per_tok") or 1) if experts else dense
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    width = each * experts if experts else dense
    layer = 2 * hidden * (attention + key_value) + 3 * hidden * width + hidden * experts + 2 * hidden
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    rows = 2 * (hidden + attention) + 2 * (hidden + key_value) + 3 * (hidden + width)
    return ModelShape(
        layers,
        hidden,
        mlp,
        attention,
        key_value,
        vocabulary,
        parameters=layers * layer + vocabulary * hidden * (1 if tied else 2) + hidden,
        adapted_rows=layers * rows,
    )


def read_config(model_name: str) -> dict[str, Any] | None:
    """Return the config.json of a local folder, or of the hub's cache on this machine; None where there is none."""
    path: Path | None = Path(model_name).expanduser() / "config.json"
    if path is not None and not path.is_file():
        path = _cached_config(model_name)
    try:
        config = None if path is None else json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _cached_config(model_name: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model_name, "config.json")
    except Exception:  # a name that the hub would not accept, or no such package: there is no estimate then
        return None
    return Path(found) if isinstance(found, str) else None


def estimate(spec: RunSpec, shape: ModelShape) -> Estimate:
    """Return the memory of a learner's rank and of a rollout worker.

    A rank of R holds 1/R of weights, gradients and moments: 4·P, 4·T and 2·s·T bytes for P parameters of which T are
    trained, with s of `optimizer.state_dtype`. Rank 0 holds the published version besides, and the next while it is
    gathered, both as wide as the sampler's weights. A sampler holds its weights, during a transfer the next ones too, and
    keys and values of all its sequences.
    """
    policy, ranks = spec.policy, max(spec.cluster.learner_ranks, 1)
    lora = policy.lora_cfg
    trained = lora.dim * shape.adapted_rows if lora.enabled else shape.parameters
    sent = trained if lora.enabled else shape.parameters
    on_gpu, sampler_on_gpu = bool(spec.cluster.learner_gpus), bool(spec.cluster.rollout_gpus)
    compute = _bytes_of(policy.precision, on_gpu)
    generation = _bytes_of(policy.generation_precision, sampler_on_gpu)
    learner = {
        "process": PROCESS_BYTES,
        "weights": 4 * (shape.parameters + (trained if lora.enabled else 0)) // ranks,
        "gradients": 4 * trained // ranks,
        "moments": 2 * DTYPE_BYTES[policy.optimizer.state_dtype] * trained // ranks,
    }
    if spec.frozen_policy is not None and not spec.pool_serves_reference and not lora.enabled:
        learner["reference"] = compute * shape.parameters // ranks
    if spec.samples and not on_gpu and spec.weights.channel == "collective":
        learner["published"] = 2 * generation * sent  # the last version stays until the next one is gathered
    tokens = _micro_batch_tokens(spec, ranks)
    sampler = {}
    if spec.samples and policy.generation.backend == "native":
        length = policy.max_total_sequence_length
        sequences = policy.generation.max_batch_size
        sampler = {
            "process": PROCESS_BYTES,
            "weights": generation * shape.parameters,
            "incoming": 0 if sampler_on_gpu else generation * sent,
            "key-value cache": sequences * length * 2 * shape.key_value * shape.layers * generation,
        }
    activations = _activation_bytes(policy, shape, tokens, compute)
    return Estimate(shape, learner, activations, tokens, sampler, on_gpu, sampler_on_gpu)


def _bytes_of(precision: str, on_gpu: bool) -> int:
    return DTYPE_BYTES[resolved_dtype(precision, "cuda" if on_gpu else "cpu")]


def _micro_batch_tokens(spec: RunSpec, ranks: int) -> int:
    """Return the most tokens of a micro-batch: its budget, or all that a rank trains in an update if that is less."""
    longest = spec.policy.max_total_sequence_length
    if not spec.samples:
        return max(spec.policy.train_mb_tokens, longest)
    grpo = spec.grpo
    sequences = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    of_update = -(-sequences // (ranks * spec.policy.num_updates_per_step)) * longest
    return max(min(spec.policy.train_mb_tokens, of_update), longest)


def _activation_bytes(policy: PolicySection, shape: ModelShape, tokens: int, compute: int) -> int:
    """Return the bytes that the backward pass needs of a micro-batch of `tokens`, and a chunk's logits."""
    layer = compute * (8 * shape.hidden + 2 * shape.attention + 2 * shape.key_value + 3 * shape.mlp)
    per_token = (
        compute * shape.hidden * shape.layers + layer
        if policy.activation_checkpointing
        else layer * shape.layers
    )
    logits = LOGITS_COPIES * 4 * min(policy.logprob_chunk_tokens, tokens) * shape.vocabulary
    return tokens * per_token + logits


def shortage(spec: RunSpec, free_bytes: int) -> str:
    """Return a warning with numbers when the processes of the run on CPUs take more than `free_bytes`; else, and for a model
    whose config.json is not on this machine, an empty text."""
    config = read_config(spec.policy.model_name)
    shape = None if config is None else shape_of(config)
    if shape is None:
        return ""
    needed = estimate(spec, shape)
    learners = 0 if needed.learner_on_gpu else spec.cluster.learner_ranks * needed.learner_bytes
    samplers = 0 if needed.sampler_on_gpu else spec.cluster.rollout_workers * needed.sampler_bytes
    if learners + samplers <= free_bytes:
        return ""
    return f"{sentence(needed, spec)}; {gigabytes(free_bytes)} are free here. {REMEDIES}"


def sentence(needed: Estimate, spec: RunSpec) -> str:
    """Return the estimate in words."""
    roles = [
        f"{_count(spec.cluster.learner_ranks, 'learner rank')} with {gigabytes(needed.learner_bytes)}, of which "
        f"{gigabytes(needed.activations)} in a full micro-batch of {needed.micro_batch_tokens:,} tokens"
    ]
    if needed.sampler:
        roles.append(
            f"{_count(spec.cluster.rollout_workers, 'rollout worker')} with {gigabytes(needed.sampler_bytes)}"
        )
    return f"a model of {needed.shape.parameters / 1e6:,.0f} M parameters takes an estimated {' and '.join(roles)}"


def gigabytes(size_bytes: int) -> str:
    """Return a size for people."""
    return f"{size_bytes / 1e9:.1f} GB"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"

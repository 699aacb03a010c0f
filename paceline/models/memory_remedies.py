"""What makes a run fit that the memory plan has no room for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from paceline.errors import InvalidInput
from paceline.models.memory_estimate import (
    gigabytes,
)
from paceline.models.memory_plan import LEAST_MB_TOKENS, SHARE_KEY, VLLM_SHARE, Room, on_gpus, plan
from paceline.models.shape import ModelShape
from paceline.spec import RunSpec
from paceline.spec.keys import with_keys

LARGEST_TENSOR_PARALLEL = 8
MOST_RANKS = 1_024


def remedies(spec: RunSpec, shape: ModelShape, room: Room) -> dict[str, Any]:
    """Return keys, with their values, that make the run fit: one alone where one is enough, else several together; empty
    where nothing tried is enough."""

    def fits(changed: Mapping[str, Any]) -> bool:
        try:
            return plan(with_keys(spec, changed), shape, room).fits
        except InvalidInput:  # such as a number of ranks that policy.parallel does not divide
            return False

    tried: dict[str, Any] = {}
    offered = list(_offers(spec))
    for key, value in offered:
        if fits({key: value}):
            return {key: value}
    for key, value in offered:
        try:
            with_keys(spec, {**tried, key: value})
        except InvalidInput:
            continue
        tried[key] = value
        if fits(tried):
            return _needed_of(tried, fits)
    return {}


def refusal(spec: RunSpec, shape: ModelShape, room: Room) -> str:
    """Return a sentence on the first device that cannot hold its load, with what makes it fit; empty when all do."""
    made = plan(spec, shape, room)
    full = next((load for load in made.loads if not load.fits), None)
    if full is None:
        return ""
    assert full.room_bytes is not None
    largest = max(full.parts, key=lambda name: full.parts[name])
    text = (
        f"{full.device} has {gigabytes(full.room_bytes)} for an estimated {gigabytes(full.bytes)}, of which "
        f"{gigabytes(full.parts[largest])} {largest}"
    )
    found = remedies(spec, shape, room)
    if not found:
        return f"{text}; no setting alone makes it fit: take more or larger GPUs, or a smaller model"
    return f"{text}; set {' and '.join(f'{key}={_text(value)}' for key, value in found.items())}"


def _offers(spec: RunSpec) -> Iterator[tuple[str, Any]]:
    """Yield settings that take less memory than those of the spec, the cheapest first."""
    policy, cluster = spec.policy, spec.cluster
    generation = policy.generation
    if generation.backend == "vllm" and spec.samples:
        size = 2 * generation.vllm_cfg.tensor_parallel_size
        while size <= LARGEST_TENSOR_PARALLEL:
            yield "policy.generation.vllm_cfg.tensor_parallel_size", size
            size *= 2
        if set(cluster.learner_gpus) & set(cluster.rollout_gpus):
            for share in (0.6, 0.5, 0.4, 0.3, 0.2):
                if share < (generation.vllm_cfg.gpu_memory_utilization or VLLM_SHARE):
                    yield SHARE_KEY, share
    elif spec.samples:
        size = generation.batch_size(on_gpu=on_gpus(spec)[1]) // 2
        while size >= 1:
            yield "policy.generation.max_batch_size", size
            size //= 2
    kinds = ("none", "selective", "full")
    at = kinds.index(policy.activation_checkpointing) if policy.activation_checkpointing in kinds else 2
    for kind in kinds[at + 1 :]:
        if not (kind == "selective" and policy.compile):
            yield "policy.activation_checkpointing", kind
    tokens = policy.row_tokens // 2
    while tokens >= max(policy.max_total_sequence_length, LEAST_MB_TOKENS):
        yield "policy.train_mb_tokens", tokens
        tokens //= 2
    if policy.optimizer.state_dtype == "float32":
        yield "policy.optimizer.state_dtype", "bfloat16"
    if on_gpus(spec)[0]:
        ranks = 2 * cluster.learner_ranks
        while ranks <= MOST_RANKS and not cluster.learner_gpus:
            yield "cluster.learner_ranks", ranks
            ranks *= 2
        if not policy.optimizer.offload and not policy.cpu_offload:
            yield "policy.optimizer.offload", True
        if not policy.cpu_offload:
            yield "policy.cpu_offload", True
    if not policy.lora_cfg.enabled:
        yield "policy.lora_cfg.enabled", True


def _needed_of(changed: dict[str, Any], fits: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
    """Return the changes without those that are not needed."""
    for key in list(changed):
        without = {name: value for name, value in changed.items() if name != key}
        if without and fits(without):
            changed = without
    return changed


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

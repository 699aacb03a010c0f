"""The settings that `auto` stands for: the engine, its part of a GPU, and what the learner's passes keep and how large they are.

They are chosen when a run is submitted, by the memory plan, so the spec that is stored has none left.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from paceline.errors import SpecError
from paceline.models.memory_estimate import (
    gigabytes,
)
from paceline.models.memory_plan import (
    LEAST_MB_TOKENS,
    SHARE_KEY,
    VLLM_SHARE,
    Room,
    on_gpus,
    plan,
    with_gpu_size,
)
from paceline.models.memory_remedies import refusal
from paceline.models.shape import ModelShape, read_shape
from paceline.spec import RunSpec
from paceline.spec.keys import with_keys

LEAST_SHARE = 0.3
"""vLLM's share of a GPU that it has together with the learner, while room for the learner is sought."""
SPARE_SHARE = 0.05
"""Part of such a GPU that neither gets: the estimate may be wrong by as much."""
MOST_AUTO_TOKENS = 32_768
"""Largest micro-batch that `auto` chooses; larger ones make a GPU no faster."""
USUAL_TOKENS = 8_192
"""Micro-batch that `auto` makes room for before it keeps more activations."""
log = logging.getLogger(__name__)


def is_open(spec: RunSpec) -> bool:
    """Return whether the spec leaves a choice to the plan."""
    generation = spec.policy.generation
    shares = generation.backend == "vllm" and _lacks_share(spec)
    return shares or "auto" in (
        spec.policy.activation_checkpointing,
        spec.policy.train_mb_tokens,
        generation.backend,
        generation.max_batch_size,
    )


def planned(
    spec: RunSpec, shape: ModelShape | None, room: Room, *, has_vllm: bool = True
) -> tuple[RunSpec, list[str]]:
    """Return the spec without `auto` in policy.generation.backend and max_batch_size, policy.activation_checkpointing and
    policy.train_mb_tokens, and with vLLM's share of a GPU that it has together with the learner; and a sentence for each key
    that was replaced.

    Chosen is the first of none, selective and full with which the usual 8,192 tokens fit (as many as the longest sequence
    has, if that is more), then the largest power of two of tokens that still fits. Where the model's sizes or the room are
    not known, they become full and 8,192. `has_vllm` says whether it is installed where the run samples.
    """
    room = with_gpu_size(spec, room)
    spec, said = with_engine(spec, has_vllm=has_vllm)
    shares = spec.policy.generation.backend == "vllm" and _lacks_share(spec)
    if shares:
        spec = with_keys(spec, {SHARE_KEY: LEAST_SHARE})
    spec, chosen = _with_passes(spec, shape, room)
    if shares and shape is not None and room.gpu_bytes is not None:
        learner = plan(spec, shape, room).estimate.learner_bytes
        share = max(LEAST_SHARE, int(100 * (1 - learner / room.gpu_bytes) - 100 * SPARE_SHARE) / 100)
        spec = with_keys(spec, {SHARE_KEY: min(share, VLLM_SHARE)})
        chosen.append(
            f"{SHARE_KEY} is {min(share, VLLM_SHARE)}: what the learner leaves on a GPU that both have"
        )
    return spec, said + chosen


def with_engine(spec: RunSpec, *, has_vllm: bool = True) -> tuple[RunSpec, list[str]]:
    """Return the spec with an engine and its number of sequences in the place of `auto`, and a sentence where it was chosen for
    GPUs."""
    spec, said = _with_backend(spec, has_vllm)
    generation = spec.policy.generation
    if generation.max_batch_size == "auto":
        size = generation.batch_size(on_gpu=on_gpus(spec)[1])
        spec = with_keys(spec, {"policy.generation.max_batch_size": size})
    return spec, said


def _with_backend(spec: RunSpec, has_vllm: bool) -> tuple[RunSpec, list[str]]:
    generation = spec.policy.generation
    if generation.backend != "auto":
        return spec, []
    is_set = generation.vllm_cfg != type(generation.vllm_cfg)() or bool(generation.vllm_kwargs)
    wants = is_set or (spec.samples and on_gpus(spec)[1])
    backend = "vllm" if wants and (has_vllm or is_set) else "native"
    said = []
    if wants and spec.samples:
        why = "on GPUs" if backend == "vllm" else "vLLM is not installed here; pip install 'paceline[vllm]'"
        said = [f"policy.generation.backend is {backend}: auto, {why}"]
    return with_keys(spec, {"policy.generation.backend": backend}), said


def _lacks_share(spec: RunSpec) -> bool:
    together = set(spec.cluster.learner_gpus) & set(spec.cluster.rollout_gpus)
    config = spec.policy.generation.vllm_cfg
    return (
        spec.samples
        and bool(together)
        and config.gpu_memory_utilization is None
        and config.kv_cache_memory_bytes is None
    )


def _with_passes(spec: RunSpec, shape: ModelShape | None, room: Room) -> tuple[RunSpec, list[str]]:
    """Return the spec without `auto` in what the learner's passes keep and how large they are."""
    policy = spec.policy
    is_auto = policy.activation_checkpointing == "auto", policy.train_mb_tokens == "auto"
    if not any(is_auto):
        return spec, []
    longest = policy.max_total_sequence_length
    known = room.gpu_bytes if on_gpus(spec)[0] else room.host_bytes
    kinds = ["none", *(() if policy.compile else ("selective",)), "full"]
    if policy.lora_cfg.enabled and policy.lora_cfg.dropout:
        kinds = ["none"]
    usual = max(USUAL_TOKENS, longest)
    if shape is None or known is None:
        why = "the model's config.json is not here" if shape is None else "cluster.gpu_gb is not set"
        chosen, tokens = kinds[-1], usual
    else:
        why = f"{gigabytes(known)} of a {'GPU' if on_gpus(spec)[0] else 'host'}"

        def fits(kind: str, tokens: int) -> bool:
            tried = {
                "policy.activation_checkpointing": kind if is_auto[0] else policy.activation_checkpointing,
                "policy.train_mb_tokens": tokens if is_auto[1] else policy.train_mb_tokens,
            }
            return plan(with_keys(spec, tried), shape, room).learner_fits

        chosen = next((kind for kind in kinds if fits(kind, usual)), kinds[-1])
        sizes = [size for size in _powers_of_two(MOST_AUTO_TOKENS) if size >= longest] or [longest]
        tokens = next((size for size in sizes if fits(chosen, size)), sizes[-1])
    changed: dict[str, Any] = {}
    if is_auto[0]:
        changed["policy.activation_checkpointing"] = chosen
    if is_auto[1]:
        changed["policy.train_mb_tokens"] = tokens
    said = [f"{key} is {value}: auto, for {why}" for key, value in changed.items()]
    return with_keys(spec, changed), said


def checked_plan(spec: RunSpec) -> RunSpec:
    """Return the spec to submit: where this machine has the model's config.json, without `auto`.

    Raises SpecError when a GPU of cluster.gpu_gb cannot hold its load.
    """
    shape = read_shape(spec.policy.model_name)
    if shape is None:
        return with_engine(spec)[0]  # the coordinator, which may have it, decides on the rest
    spec, chosen = planned(spec, shape, Room())
    for line in chosen:
        log.info("%s", line)
    if why_not := refusal(spec, shape, Room()):
        raise SpecError(why_not)
    return spec


def _powers_of_two(most: int) -> Iterator[int]:
    """Yield powers of two from `most` down to LEAST_MB_TOKENS."""
    size = most
    while size >= LEAST_MB_TOKENS:
        yield size
        size //= 2

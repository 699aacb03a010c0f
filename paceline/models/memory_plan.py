"""The memory plan of a run: the load of each device, remedies if it does not fit, and the values that replace `auto`.
The plan follows from the spec, the model's sizes and the memory of the devices, without inspecting this machine. The
estimate is `paceline/models/memory_estimate.py`; docs/operate/performance.md, "Memory plan", has measurements.
`auto` is replaced when a run is submitted, so a stored spec has none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import InvalidInput, SpecError, counted
from paceline.models.loading import resolved_dtype
from paceline.models.memory_estimate import CONTEXT_BYTES, DTYPE_BYTES, Estimate, estimate, gigabytes, key_value_bytes
from paceline.models.shape import STATE_BYTES, MeshShape, ModelShape, mesh_shape, read_shape, state_room
from paceline.spec import RunSpec
from paceline.spec.keys import with_keys

GPUS_PER_HOST = 8
"""If the learner has more ranks than this number, each host is assumed to have this number of GPUs."""
VLLM_SHARE = 0.92
"""Share of a GPU that vLLM 0.32 and 0.33 use by default."""
SHARE_KEY = "policy.generation.vllm_cfg.gpu_memory_utilization"
VLLM_WORKSPACE_BYTES = 3_000_000_000
"""Bytes that vLLM takes beside weights and KV cache: CUDA graphs, a step's activations, contexts of its processes."""
LEAST_MB_TOKENS = 1_024
HOST = "the host"


@dataclass(frozen=True)
class Room:
    gpu_bytes: int | None = None
    """Bytes of one GPU; None: unknown."""
    host_bytes: int | None = None
    """Bytes that are free on the host of a run on CPUs; None: unknown."""


@dataclass(frozen=True)
class Load:
    device: str
    parts: Mapping[str, int]
    """Bytes of each purpose on the device."""
    room_bytes: int | None

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Return whether the parts fit; true if the room is unknown."""
        return self.room_bytes is None or self.bytes <= self.room_bytes


@dataclass(frozen=True)
class Plan:
    estimate: Estimate
    mesh: MeshShape
    loads: tuple[Load, ...]
    cached_tokens: int | None = None
    """Tokens whose keys and values fit in one vLLM engine; None for the native engine, or if the room is unknown."""

    @property
    def learner_fits(self) -> bool:
        return all(load.fits for load in self.loads if "learner" in load.device or load.device == HOST)

    @property
    def fits(self) -> bool:
        return all(load.fits for load in self.loads)


def on_gpus(spec: RunSpec) -> tuple[bool, bool]:
    """Return whether learner and rollout workers compute on GPUs: the spec names some, or gives the size of a GPU."""
    cluster = spec.cluster
    elsewhere = cluster.gpu_gb is not None and not (cluster.learner_gpus or cluster.rollout_gpus)
    return bool(cluster.learner_gpus) or elsewhere, bool(cluster.rollout_gpus) or elsewhere


def plan(spec: RunSpec, shape: ModelShape, room: Room) -> Plan:
    """Return the load of each kind of device. `auto` settings count with their defaults (`planned` replaces them).
    Raises InvalidInput if policy.parallel does not match the number of ranks."""
    room = with_gpu_size(spec, room)
    learner_on_gpu, sampler_on_gpu = on_gpus(spec)
    ranks = spec.cluster.learner_ranks
    hosts = max(ranks // GPUS_PER_HOST, 1) if learner_on_gpu else 1

    def fits_host() -> bool:
        state = STATE_BYTES * shape.parameters
        return room.gpu_bytes is not None and state <= state_room(ranks // hosts, room.gpu_bytes)

    mesh = mesh_shape(spec.policy.parallel, ranks, hosts, fits_host)
    needed = estimate(spec, shape, shards=mesh.shard, learner_on_gpu=learner_on_gpu, sampler_on_gpu=sampler_on_gpu)
    learner = {**needed.learner, "activations": needed.activations}
    loads: list[Load] = []
    host: dict[str, int] = {}
    engine, cached, engine_room = _engine(spec, needed, room) if spec.samples else ({}, None, None)
    together = learner_on_gpu and bool(set(spec.cluster.learner_gpus) & set(spec.cluster.rollout_gpus))
    if together and engine:
        on_it = engine if engine_room is None else {"all": engine_room}
        loads.append(_load("each GPU of learner and rollout", room.gpu_bytes, learner, _named("engine", on_it)))
    elif learner_on_gpu:
        loads.append(_load("each GPU of the learner", room.gpu_bytes, learner))
    else:
        host |= _named("learner", {name: ranks * size for name, size in learner.items()})
    if needed.offloaded:
        host[f"offloaded state of {counted(ranks, 'rank')}"] = ranks * needed.offloaded
    if engine and sampler_on_gpu and engine_room is not None:
        loads.append(_load("vLLM's share of each GPU", engine_room, engine))
    elif engine and sampler_on_gpu and not together:
        loads.append(_load("each GPU of the rollout", room.gpu_bytes, engine))
    elif engine and not sampler_on_gpu:
        workers = spec.cluster.rollout_workers
        host |= _named("engine", {name: workers * size for name, size in engine.items()})
    if host:
        loads.append(Load(HOST, host, room.host_bytes))
    return Plan(needed, mesh, tuple(loads), cached)


def _engine(spec: RunSpec, needed: Estimate, room: Room) -> tuple[dict[str, int], int | None, int | None]:
    """Return an engine's parts on its device, the tokens in vLLM's cache, and the bytes of vLLM's share of a GPU."""
    if spec.policy.generation.backend != "vllm":
        return dict(needed.sampler), None, None
    generation = spec.policy.generation
    config, shape = generation.vllm_cfg, needed.shape
    width = DTYPE_BYTES[resolved_dtype(spec.policy.generation_precision, "cuda" if needed.sampler_on_gpu else "cpu")]
    divided = config.tensor_parallel_size * config.pipeline_parallel_size
    heads = min(config.tensor_parallel_size, shape.key_value_heads) * config.pipeline_parallel_size
    token = key_value_bytes(shape, width) // heads
    fixed = {
        "process": CONTEXT_BYTES if needed.sampler_on_gpu else 0,
        "weights": width * shape.parameters // divided,
        "workspace": VLLM_WORKSPACE_BYTES if needed.sampler_on_gpu else CONTEXT_BYTES,
    }
    longest = token * spec.policy.max_total_sequence_length
    share = None
    if config.kv_cache_memory_bytes is not None or not needed.sampler_on_gpu:
        cache = config.kv_cache_memory_bytes or 1 << 30
    elif room.gpu_bytes is None:
        cache = longest
    else:
        share = int((config.gpu_memory_utilization or VLLM_SHARE) * room.gpu_bytes)
        cache = max(share - sum(fixed.values()), longest)  # vLLM does not start with less than the longest sequence
    return {**fixed, "keys and values": cache}, cache // token, share


def with_gpu_size(spec: RunSpec, room: Room) -> Room:
    """Return `room` with the size of a GPU from cluster.gpu_gb, if that is set."""
    if spec.cluster.gpu_gb is None:
        return room
    return Room(int(spec.cluster.gpu_gb * 1e9), room.host_bytes)


def _load(device: str, room_bytes: int | None, *parts: Mapping[str, int]) -> Load:
    return Load(device, {name: size for each in parts for name, size in each.items() if size}, room_bytes)


def _named(role: str, parts: Mapping[str, int]) -> dict[str, int]:
    return {f"{role} {name}": size for name, size in parts.items() if size}


LARGEST_TENSOR_PARALLEL = 8
MOST_RANKS = 1_024


def remedies(spec: RunSpec, shape: ModelShape, room: Room) -> dict[str, Any]:
    """Return values for keys with which the run fits: one key if that is enough, else several; empty if none do."""

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
    """Return a sentence about the first device whose load does not fit, with a remedy; empty if all fit."""
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
    settings = remedies(spec, shape, room)
    if not settings:
        return f"{text}; no setting alone makes it fit: take more or larger GPUs, or a smaller model"
    return f"{text}; set {' and '.join(f'{key}={_text(value)}' for key, value in settings.items())}"


def _offers(spec: RunSpec) -> Iterator[tuple[str, Any]]:
    """Yield settings that take less memory than the spec's, cheapest first."""
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
    if spec.num_kept_versions:
        yield "logger.verify_versions", 0
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
    for key in list(changed):
        without = {name: value for name, value in changed.items() if name != key}
        if without and fits(without):
            changed = without
    return changed


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


LEAST_SHARE = 0.3
"""Share of a GPU that vLLM is assumed to use beside the learner while the learner's settings are chosen."""
SPARE_SHARE = 0.05
"""Share of a GPU shared by vLLM and the learner that stays free, as a margin for the estimate's error."""
AUTO_TOKENS = (32_768, 16_384, 8_192, 4_096, 2_048, LEAST_MB_TOKENS)
"""Sizes in tokens of the micro-batches among which `auto` chooses. Larger micro-batches would make a GPU no faster."""
USUAL_TOKENS = 8_192
"""Usual tokens of a micro-batch: `auto` keeps more activations only if a micro-batch of this size fits with them."""
UNSHARED = (
    "policy.shared_prompts is false, chosen by auto: on GPUs it is not measured yet; true shares prompts anywhere"
)
log = logging.getLogger(__name__)


def is_open(spec: RunSpec) -> bool:
    """Return whether the plan has a setting to choose."""
    generation = spec.policy.generation
    shares = generation.backend == "vllm" and _lacks_share(spec)
    return shares or "auto" in (
        spec.policy.activation_checkpointing,
        spec.policy.train_mb_tokens,
        spec.policy.shared_prompts,
        generation.backend,
        generation.max_batch_size,
    )


def planned(spec: RunSpec, shape: ModelShape | None, room: Room, *, has_vllm: bool = True) -> tuple[RunSpec, list[str]]:
    """Return the spec with values for `auto` (policy.generation.backend and max_batch_size, policy.train_mb_tokens,
    policy.activation_checkpointing, policy.shared_prompts) and vLLM's share of a GPU of the learner; a sentence for
    each replaced key. policy.activation_checkpointing becomes the first of none, selective and full with which the
    usual 8,192 tokens fit (or the longest sequence, if that is more); then policy.train_mb_tokens becomes the largest
    power of two that fits. If the model's sizes or the room are unknown, the values are full and 8,192. Prompts are
    shared if the learner is known to run on CPUs. `has_vllm`: vLLM is installed where the run samples."""
    room = with_gpu_size(spec, room)
    spec, notes = with_engine(spec, has_vllm=has_vllm)
    shares = spec.policy.generation.backend == "vllm" and _lacks_share(spec)
    if shares:
        spec = with_keys(spec, {SHARE_KEY: LEAST_SHARE})
    spec, chosen = _with_passes(spec, shape, room)
    if shares and shape is not None and room.gpu_bytes is not None:
        learner = plan(spec, shape, room).estimate.learner_bytes
        share = max(LEAST_SHARE, int(100 * (1 - learner / room.gpu_bytes) - 100 * SPARE_SHARE) / 100)
        spec = with_keys(spec, {SHARE_KEY: min(share, VLLM_SHARE)})
        chosen.append(f"{SHARE_KEY} is {min(share, VLLM_SHARE)}: the rest of a GPU shared with the learner")
    spec, unshared = _with_shared_prompts(spec, room)
    return spec, notes + chosen + unshared


def with_engine(spec: RunSpec, *, has_vllm: bool = True) -> tuple[RunSpec, list[str]]:
    """Return the spec with engine and batch size in place of `auto`, and a sentence on an engine chosen for GPUs."""
    spec, notes = _with_backend(spec, has_vllm)
    generation = spec.policy.generation
    if generation.max_batch_size == "auto":
        size = generation.batch_size(on_gpu=on_gpus(spec)[1])
        spec = with_keys(spec, {"policy.generation.max_batch_size": size})
    return spec, notes


def _with_backend(spec: RunSpec, has_vllm: bool) -> tuple[RunSpec, list[str]]:
    generation = spec.policy.generation
    if generation.backend != "auto":
        return spec, []
    is_set = generation.vllm_cfg != type(generation.vllm_cfg)() or bool(generation.vllm_kwargs)
    wants = is_set or (spec.samples and on_gpus(spec)[1])
    backend = "vllm" if wants and (has_vllm or is_set) else "native"
    notes = []
    if wants and spec.samples:
        why = "on GPUs" if backend == "vllm" else "vLLM is not installed on this machine; pip install 'paceline[vllm]'"
        notes = [f"policy.generation.backend is {backend}: auto, {why}"]
    return with_keys(spec, {"policy.generation.backend": backend}), notes


def _with_shared_prompts(spec: RunSpec, room: Room) -> tuple[RunSpec, list[str]]:
    if spec.policy.shared_prompts != "auto":
        return spec, []
    # A spec that names no GPU may still go to learners on GPUs of other hosts.
    on_gpu = on_gpus(spec)[0]
    on_cpus = not on_gpu and (spec.cluster.device == "cpu" or room.host_bytes is not None)
    notes = [UNSHARED] if on_gpu and spec.samples else []
    return with_keys(spec, {"policy.shared_prompts": on_cpus}), notes


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
    """Return the spec with values for `auto` in activation checkpointing and micro-batch size."""
    policy = spec.policy
    is_auto = policy.activation_checkpointing == "auto", policy.train_mb_tokens == "auto"
    if not any(is_auto):
        return spec, []
    longest = policy.max_total_sequence_length
    room_bytes = room.gpu_bytes if on_gpus(spec)[0] else room.host_bytes
    kinds = ["none", *(() if policy.compile else ("selective",)), "full"]
    if policy.lora_cfg.enabled and policy.lora_cfg.dropout:
        kinds = ["none"]
    usual = max(USUAL_TOKENS, longest)
    if shape is None or room_bytes is None:
        why = "the model's config.json is not on this machine" if shape is None else "cluster.gpu_gb is not set"
        chosen, tokens = kinds[-1], usual
    else:
        why = f"a {'GPU' if on_gpus(spec)[0] else 'host'} has room for {gigabytes(room_bytes)}"

        def fits(kind: str, tokens: int) -> bool:
            tried = {
                "policy.activation_checkpointing": kind if is_auto[0] else policy.activation_checkpointing,
                "policy.train_mb_tokens": tokens if is_auto[1] else policy.train_mb_tokens,
            }
            return plan(with_keys(spec, tried), shape, room).learner_fits

        chosen = next((kind for kind in kinds if fits(kind, usual)), kinds[-1])
        sizes = [size for size in AUTO_TOKENS if size >= longest] or [longest]
        tokens = next((size for size in sizes if fits(chosen, size)), sizes[-1])
    changed: dict[str, Any] = {}
    if is_auto[0]:
        changed["policy.activation_checkpointing"] = chosen
    if is_auto[1]:
        changed["policy.train_mb_tokens"] = tokens
    notes = [f"{key} is {value}, chosen by auto: {why}" for key, value in changed.items()]
    return with_keys(spec, changed), notes


def checked_plan(spec: RunSpec) -> RunSpec:
    """Return the spec to submit; if this machine has the model's config.json, values replace each `auto`. Raises
    SpecError if the load of a GPU of cluster.gpu_gb does not fit."""
    shape = read_shape(spec.policy.model_name)
    if shape is None:
        return with_engine(spec)[0]  # the coordinator may have the model, and decides the rest
    spec, chosen = planned(spec, shape, Room())
    for line in chosen:
        log.info("%s", line)
    if why_not := refusal(spec, shape, Room()):
        raise SpecError(why_not)
    return spec

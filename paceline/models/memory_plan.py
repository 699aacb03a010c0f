"""The memory plan of a run: what each of its devices has to hold.

All of it follows from the spec, the model's sizes and the room on the devices, without looking at this machine. The estimate
is `paceline/models/memory_estimate.py`; measured ones are in docs/performance.md, "Memory plan". What makes a run fit is
`memory_remedies.py`, and what `auto` stands for `auto_settings.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.models.loading import resolved_dtype
from paceline.models.memory_estimate import (
    CONTEXT_BYTES,
    DTYPE_BYTES,
    Estimate,
    estimate,
    key_value_bytes,
)
from paceline.models.mesh_shape import STATE_BYTES, MeshShape, mesh_shape, state_room
from paceline.models.shape import ModelShape
from paceline.spec import RunSpec

GPUS_PER_HOST = 8
"""GPUs of a host, where a learner has more ranks than that."""
VLLM_SHARE = 0.92
"""Part of a GPU that vLLM 0.32 and 0.33 take by default."""
SHARE_KEY = "policy.generation.vllm_cfg.gpu_memory_utilization"
VLLM_WORKSPACE_BYTES = 3_000_000_000
"""What vLLM takes beside weights and KV cache: CUDA graphs, activations of a step, its processes' contexts."""
LEAST_MB_TOKENS = 1_024
HOST = "the host"


@dataclass(frozen=True)
class Room:
    """Memory that a run may take."""

    gpu_bytes: int | None = None
    """Of one GPU; None: not known."""
    host_bytes: int | None = None
    """Free on the host of a run on CPUs; None: not known."""


@dataclass(frozen=True)
class Load:
    """What one device has to hold."""

    device: str
    parts: Mapping[str, int]
    """Bytes by purpose."""
    room_bytes: int | None

    @property
    def bytes(self) -> int:
        """Sum of the parts."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Return whether the parts have room, also where the room is not known."""
        return self.room_bytes is None or self.bytes <= self.room_bytes


@dataclass(frozen=True)
class Plan:
    """Loads of all kinds of devices of a run."""

    estimate: Estimate
    mesh: MeshShape
    loads: tuple[Load, ...]
    cached_tokens: int | None = None
    """Tokens whose keys and values one vLLM engine has room for; None for the native engine, or without a known room."""

    @property
    def learner_fits(self) -> bool:
        """Return whether the devices of the learner hold their load."""
        return all(load.fits for load in self.loads if "learner" in load.device or load.device == HOST)

    @property
    def fits(self) -> bool:
        """Return whether every device holds its load."""
        return all(load.fits for load in self.loads)


def on_gpus(spec: RunSpec) -> tuple[bool, bool]:
    """Return whether the learner and the rollout workers compute on GPUs: where the spec names some, or gives the size of
    those elsewhere."""
    cluster = spec.cluster
    elsewhere = cluster.gpu_gb is not None and not (cluster.learner_gpus or cluster.rollout_gpus)
    return bool(cluster.learner_gpus) or elsewhere, bool(cluster.rollout_gpus) or elsewhere


def plan(spec: RunSpec, shape: ModelShape, room: Room) -> Plan:
    """Return what each kind of device holds. `auto` settings count as they are without a plan (`planned` replaces them).

    Raises InvalidInput when policy.parallel does not make the number of ranks.
    """
    room = with_gpu_size(spec, room)
    learner_on_gpu, sampler_on_gpu = on_gpus(spec)
    ranks = spec.cluster.learner_ranks
    hosts = max(ranks // GPUS_PER_HOST, 1) if learner_on_gpu else 1

    def fits_host() -> bool:
        state = STATE_BYTES * shape.parameters
        return room.gpu_bytes is not None and state <= state_room(ranks // hosts, room.gpu_bytes)

    mesh = mesh_shape(spec.policy.parallel, ranks, hosts, fits_host)
    needed = estimate(
        spec, shape, shards=mesh.shard, learner_on_gpu=learner_on_gpu, sampler_on_gpu=sampler_on_gpu
    )
    learner = {**needed.learner, "activations": needed.activations}
    loads: list[Load] = []
    host: dict[str, int] = {}
    engine, cached, engine_room = _engine(spec, needed, room) if spec.samples else ({}, None, None)
    together = learner_on_gpu and bool(set(spec.cluster.learner_gpus) & set(spec.cluster.rollout_gpus))
    if together and engine:
        on_it = engine if engine_room is None else {"all": engine_room}
        loads.append(
            _load("each GPU of learner and rollout", room.gpu_bytes, learner, _named("engine", on_it))
        )
    elif learner_on_gpu:
        loads.append(_load("each GPU of the learner", room.gpu_bytes, learner))
    else:
        host |= _named("learner", {name: ranks * size for name, size in learner.items()})
    if needed.offloaded:
        host[f"offloaded state of {ranks} ranks"] = ranks * needed.offloaded
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
    """Return the parts of one engine on its device, the tokens that vLLM's cache has room for, and the bytes of a GPU that it
    takes as its own."""
    if spec.policy.generation.backend != "vllm":
        return dict(needed.sampler), None, None
    generation = spec.policy.generation
    config, shape = generation.vllm_cfg, needed.shape
    width = DTYPE_BYTES[
        resolved_dtype(spec.policy.generation_precision, "cuda" if needed.sampler_on_gpu else "cpu")
    ]
    divided = config.tensor_parallel_size * config.pipeline_parallel_size
    heads = min(config.tensor_parallel_size, shape.key_value_heads) * config.pipeline_parallel_size
    token = key_value_bytes(shape, width) // heads
    fixed = {
        "process": CONTEXT_BYTES if needed.sampler_on_gpu else 0,
        "weights": width * shape.parameters // divided,
        "workspace": VLLM_WORKSPACE_BYTES if needed.sampler_on_gpu else CONTEXT_BYTES,
    }
    one = token * spec.policy.max_total_sequence_length
    share = None
    if config.kv_cache_memory_bytes is not None or not needed.sampler_on_gpu:
        cache = config.kv_cache_memory_bytes or 1 << 30
    elif room.gpu_bytes is None:
        cache = one
    else:
        share = int((config.gpu_memory_utilization or VLLM_SHARE) * room.gpu_bytes)
        cache = max(share - sum(fixed.values()), one)  # it does not start with less than the longest sequence
    return {**fixed, "keys and values": cache}, cache // token, share


def with_gpu_size(spec: RunSpec, room: Room) -> Room:
    """Return the room with the size of GPUs that the spec gives."""
    if spec.cluster.gpu_gb is None:
        return room
    return Room(int(spec.cluster.gpu_gb * 1e9), room.host_bytes)


def _load(device: str, room_bytes: int | None, *parts: Mapping[str, int]) -> Load:
    return Load(device, {name: size for each in parts for name, size in each.items() if size}, room_bytes)


def _named(role: str, parts: Mapping[str, int]) -> dict[str, int]:
    return {f"{role} {name}": size for name, size in parts.items() if size}

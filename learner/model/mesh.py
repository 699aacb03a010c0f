"""The mesh of the learner's ranks: `shard` neighbouring ranks divide a model among themselves, and `replicate` such divisions
hold the same (hybrid sharding, HSDP).

Neighbouring ranks are on one host, so that gathers and scatters of parameters stay there as long as `shard` is at most the
ranks of a host; between the replicas only the sums of gradients travel.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from learner.collectives import world_size
from paceline.errors import InvalidInput
from paceline.models.memory_estimate import gigabytes, read_config, shape_of
from paceline.spec import ParallelSection, PolicySection

STATE_BYTES = 16
"""Bytes of a parameter with its gradient and its moments, all in float32."""
HOST_SHARE = 0.7
"""Part of a host's GPU memory that the state may take for `auto` to make replicas; the rest is for activations."""

log = logging.getLogger(__name__)
_meshes: dict[tuple[Any, str, MeshShape], DeviceMesh] = {}


class MeshShape(NamedTuple):
    """Sizes of the mesh; their product is the number of ranks."""

    replicate: int
    shard: int


def mesh_shape(parallel: ParallelSection, ranks: int, hosts: int, fits_host: Callable[[], bool]) -> MeshShape:
    """Return the sizes for `ranks` ranks on `hosts` hosts. `auto` divides a model by all ranks, but on several hosts makes a
    replica of each where `fits_host` says that the ranks of one hold it.

    Raises InvalidInput when the sizes do not make the number of ranks.
    """
    replicate, shard = parallel.replicate, parallel.shard
    if replicate == "auto" and shard == "auto":
        replicate = hosts if hosts > 1 and ranks % hosts == 0 and fits_host() else 1
    if replicate == "auto":
        assert shard != "auto"
        replicate = ranks // shard
    if shard == "auto":
        shard = ranks // replicate
    if replicate * shard != ranks:
        raise InvalidInput(
            f"policy.parallel.replicate {parallel.replicate} and shard {parallel.shard} do not make {ranks}, the number of the "
            "learner's ranks; set one of them to auto, or to a divisor"
        )
    return MeshShape(replicate, shard)


def mesh_of(policy: PolicySection, device: torch.device) -> DeviceMesh:
    """Return the mesh of all ranks, with one dimension where there are no replicas. A group of one is made where there is no
    process group. The first call for these sizes is a collective one. Raises InvalidInput."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    ranks = world_size()
    hosts = ranks // int(os.environ.get("LOCAL_WORLD_SIZE") or ranks)
    shape = mesh_shape(policy.parallel, ranks, hosts, lambda: _fits_host(policy, device, ranks // hosts))
    key = (dist.group.WORLD, device.type, shape)
    if key not in _meshes:
        if shape.replicate == 1:
            _meshes[key] = init_device_mesh(device.type, (ranks,))
        else:
            log.info("%d replicas of the model, each divided by %d ranks", *shape)
            _meshes[key] = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    return _meshes[key]


def mesh_groups() -> list[dist.ProcessGroup]:
    """Return the process groups of the meshes of this process, besides the default one."""
    if not dist.is_initialized():
        return []
    return [
        mesh.get_group(dimension)
        for (world, _, shape), mesh in _meshes.items()
        for dimension in range(mesh.ndim)
        if world is dist.group.WORLD and shape.replicate > 1
    ]


def shard_group(tensor: DTensor) -> tuple[int, dist.ProcessGroup]:
    """Return among how many ranks a tensor's rows are divided, and the group of them that this rank is in."""
    last = tensor.device_mesh.ndim - 1
    return tensor.device_mesh.size(last), tensor.device_mesh.get_group(last)


def in_first_replica(tensor: DTensor) -> bool:
    """Return whether this rank is of the replica that rank 0 is in."""
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is None or not any(coordinate[:-1])


def _fits_host(policy: PolicySection, device: torch.device, ranks: int) -> bool:
    """Return whether the GPUs of one host hold the state of the model. False on CPUs, whose memory the ranks share."""
    if device.type != "cuda":
        return False
    config = read_config(policy.model_name)
    shape = None if config is None else shape_of(config)
    if shape is None:
        return False
    needed = STATE_BYTES * shape.parameters
    room = int(HOST_SHARE * ranks * torch.cuda.get_device_properties(device).total_memory)
    log.info(
        "policy.parallel: the state of the model takes %s, the GPUs of a host have room for %s",
        gigabytes(needed),
        gigabytes(room),
    )
    return needed <= room

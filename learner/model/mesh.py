"""The mesh of the learner's ranks: `replicate` copies of the model, each on `shard` neighbouring ranks (HSDP).
Neighbouring ranks are on one host, so gathers and scatters of parameters stay on that host as long as `shard` is at
most the number of its ranks; only the sums of gradients travel between replicas."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from paceline.learner.collectives import world_size
from paceline.models.memory_estimate import gigabytes
from paceline.models.shape import STATE_BYTES, MeshShape, mesh_shape, read_shape, state_room
from paceline.spec import PolicySection

log = logging.getLogger(__name__)
_meshes: dict[tuple[Any, str, MeshShape], DeviceMesh] = {}


def mesh_of(policy: PolicySection, device: torch.device) -> DeviceMesh:
    """Return the mesh of all ranks; it has one dimension if there are no replicas. If there is no process group, a
    group of a single rank is made first. The first call for the same sizes is a collective call. Raises InvalidInput.
    """
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
            log.info("%d replicas of the model, each divided among %d ranks", *shape)
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


def reshard(model: nn.Module) -> None:
    """Free gathered weights. After a pass without a backward pass nothing else frees them, and later passes would use
    their old values although a checkpoint or the optimizer has changed the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def shard_group(tensor: DTensor) -> tuple[int, dist.ProcessGroup]:
    last = tensor.device_mesh.ndim - 1
    return tensor.device_mesh.size(last), tensor.device_mesh.get_group(last)


def in_first_replica(tensor: DTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is None or not any(coordinate[:-1])


def _fits_host(policy: PolicySection, device: torch.device, ranks: int) -> bool:
    """Return whether the GPUs of one host have room for the model's state. False on CPUs, whose memory the ranks share."""
    if device.type != "cuda":
        return False
    shape = read_shape(policy.model_name)
    if shape is None:
        return False
    needed = STATE_BYTES * shape.parameters
    room = state_room(ranks, torch.cuda.get_device_properties(device).total_memory)
    text = "policy.parallel: the state of the model needs %s, but the GPUs of a host have room for %s"
    log.info(text, gigabytes(needed), gigabytes(room))
    return needed <= room

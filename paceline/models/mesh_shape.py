"""Sizes of the mesh of the learner's ranks: `replicate` copies of a model, each divided by `shard` ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from paceline.errors import InvalidInput
from paceline.spec import ParallelSection

STATE_BYTES = 16
"""Bytes of a parameter with its gradient and its moments, all in float32."""
HOST_SHARE = 0.7
"""Part of a host's GPU memory that the state may take for `auto` to make replicas; the rest is for activations."""


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


def state_room(ranks: int, gpu_bytes: int) -> int:
    """Return the bytes that the state of a replica may take on a host whose `ranks` GPUs have `gpu_bytes` each."""
    return int(HOST_SHARE * ranks * gpu_bytes)

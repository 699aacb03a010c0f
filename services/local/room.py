"""The room for a run on this host, and its division."""

from __future__ import annotations

import importlib.util

from paceline.errors import SpecError
from paceline.host.memory import available_bytes
from paceline.models.memory_plan import Room, planned, refusal
from paceline.models.shape import read_shape
from paceline.services.common.gpus import divide, memory_of_gpus, usable_gpus
from paceline.spec import RunSpec


def room_here() -> Room:
    """Return the memory of the smallest GPU of this host, if it has any that torch can use, and its free memory."""
    sizes = memory_of_gpus() if usable_gpus() else ()
    return Room(min(sizes, default=None), available_bytes())


def cluster_here(spec: RunSpec) -> tuple[RunSpec, str]:
    """Return the spec with the GPUs of this host divided as `paceline up` does it, and the sentence on it; unchanged where the
    spec names GPUs, or the size of GPUs elsewhere."""
    if spec.cluster.gpu_gb is not None or spec.cluster.learner_gpus or spec.cluster.rollout_gpus:
        return spec, ""
    cluster, division = divide(spec.cluster, len(usable_gpus()), rollout=spec.samples)
    return spec.model_copy(update={"cluster": cluster}), division


def planned_here(spec: RunSpec) -> tuple[RunSpec, list[str]]:
    """Return the spec without `auto` for a run on this host, and what was chosen.

    Raises SpecError when a GPU cannot hold its load. What does not fit into the host's free memory, which changes, is only
    warned of (`paceline.models.memory_estimate.shortage`).
    """
    room, shape = room_here(), read_shape(spec.policy.model_name)
    spec, chosen = planned(spec, shape, room, has_vllm=importlib.util.find_spec("vllm") is not None)
    if shape is not None and (why_not := refusal(spec, shape, Room(gpu_bytes=room.gpu_bytes))):
        raise SpecError(why_not)
    return spec, chosen

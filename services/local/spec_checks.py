"""Checks of this machine against one spec: its files, its GPUs and its memory. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import SpecError
from paceline.host.memory import available_bytes
from paceline.models.memory_estimate import (
    Estimate,
    estimate,
    gigabytes,
    sentence,
    shortage,
)
from paceline.models.shape import read_shape
from paceline.services.common.gpus import divide, missing_gpus, named_in
from paceline.services.local.machine_checks import Finding
from paceline.services.local.missing_paths import missing_paths
from paceline.spec import RunSpec


def examine_spec(
    spec: RunSpec, gpu_bytes: Sequence[int] | None = None, free_bytes: int | None = None
) -> list[Finding]:
    """Return whether this machine has the local files, the GPUs and the memory that the spec asks for.

    `gpu_bytes` are the sizes of the GPUs that torch can use, and `free_bytes` the host's free memory; by default both are
    detected.
    """
    sizes = _gpus_of_torch() if gpu_bytes is None else gpu_bytes
    findings = [Finding("its files", "fault", text) for text in missing_paths(spec)]
    if named_in(spec.cluster):
        missing = missing_gpus(spec.cluster, len(sizes))
        status, value = ("fault", missing) if missing else ("ok", "all that the spec names are here")
        findings.append(Finding("its GPUs", status, value))  # type: ignore[arg-type]
    try:
        cluster, _ = divide(spec.cluster, len(sizes), rollout=spec.samples)
        spec = spec.model_copy(update={"cluster": cluster})
    except SpecError as error:
        if not any(each.name == "its GPUs" for each in findings):
            findings.append(Finding("its GPUs", "fault", str(error)))
    shape = read_shape(spec.policy.model_name)
    if shape is None:
        value = f"not estimated: no config.json of {spec.policy.model_name!r} with the usual keys is on this machine"
        return [*findings, Finding("its memory", "absent", value)]
    return [*findings, _memory(spec, estimate(spec, shape), sizes, free_bytes)]


def _memory(spec: RunSpec, needed: Estimate, gpu_bytes: Sequence[int], free_bytes: int | None) -> Finding:
    if small := _too_small(spec, needed, gpu_bytes):
        return Finding("its memory", "absent", sentence(needed, spec), small)
    free = available_bytes() if free_bytes is None else free_bytes
    if warning := shortage(spec, free):
        return Finding(
            "its memory", "absent", warning, "an estimate; train where there is more, or change these keys"
        )
    return Finding("its memory", "ok", f"{sentence(needed, spec)}; {gigabytes(free)} are free here")


def _too_small(spec: RunSpec, needed: Estimate, gpu_bytes: Sequence[int]) -> str:
    """Return which GPU has less memory than the roles on it take; empty when none has."""
    load = dict.fromkeys(range(len(gpu_bytes)), 0)
    for on_gpu, gpus, size in (
        (needed.learner_on_gpu, spec.cluster.learner_gpus, needed.learner_bytes),
        (needed.sampler_on_gpu, spec.cluster.rollout_gpus, needed.sampler_bytes),
    ):
        for gpu in gpus if on_gpu else ():
            if gpu in load:
                load[gpu] += size
    for gpu, size in load.items():
        if size > gpu_bytes[gpu]:
            return f"GPU {gpu} has {gigabytes(gpu_bytes[gpu])} for {gigabytes(size)}"
    return ""


def _gpus_of_torch() -> list[int]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [
        int(torch.cuda.get_device_properties(index).total_memory)
        for index in range(torch.cuda.device_count())
    ]

"""`paceline doctor`: tests this machine, and a spec's files, GPUs and memory; changes nothing, and names each remedy."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import shutil
import socket
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from paceline.errors import InvalidInput, SpecError
from paceline.host.resources import available_bytes, usable_cores
from paceline.models.memory_estimate import Estimate, estimate, gigabytes, sentence, shortage
from paceline.models.shape import read_shape
from paceline.services.common.gpus import divide, missing_gpus, named_in
from paceline.services.common.options import directory_option, json_option, print_json
from paceline.services.local.cluster import USUAL_PORT, free_port
from paceline.services.local.room import missing_paths
from paceline.spec import RunSpec
from paceline.user_code.box import why_no_isolation

MARKS = {"ok": "✓", "absent": "·", "fault": "✗"}


@click.command()
@click.argument("spec", required=False, type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@directory_option
@json_option
def doctor(spec: str | None, overrides: tuple[str, ...], directory: Path, as_json: bool) -> None:
    """Check this machine: what it has, what is missing and how to get it; exit status 1 if something has to be fixed.

    With SPEC also check its files and its GPUs, and estimate the memory of its services.
    """
    from paceline.spec.reading import load_spec

    loaded = load_spec(spec, overrides) if spec else None
    findings = [*examine(directory), *examine_sandbox(loaded), examine_user_code()]
    if loaded is not None:
        findings += examine_spec(loaded)
    for finding in findings:
        if as_json:
            print_json(dataclasses.asdict(finding))
        else:
            remedy = f" → {finding.remedy}" if finding.remedy else ""
            click.echo(f"{MARKS[finding.status]} {finding.name:<13} {finding.value}{remedy}")
    if any(finding.status == "fault" for finding in findings):
        raise click.exceptions.Exit(1)


def examine_spec(spec: RunSpec, gpu_bytes: Sequence[int] | None = None, free_bytes: int | None = None) -> list[Finding]:
    """Return whether this machine has the local files, the GPUs and the memory that the spec needs. If `gpu_bytes` (of
    each GPU that torch can use) or `free_bytes` (of the host) is None, it is detected."""
    sizes = _gpus_of_torch() if gpu_bytes is None else gpu_bytes
    findings = [Finding("its files", "fault", text) for text in missing_paths(spec)]
    if named_in(spec.cluster):
        missing = missing_gpus(spec.cluster, len(sizes))
        status, value = (
            ("fault", missing) if missing else ("ok", "all files and folders of the spec are on this machine")
        )
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
    return [*findings, _memory_for(spec, estimate(spec, shape), sizes, free_bytes)]


def _memory_for(spec: RunSpec, needed: Estimate, gpu_bytes: Sequence[int], free_bytes: int | None) -> Finding:
    if small := _too_small(spec, needed, gpu_bytes):
        return Finding("its memory", "absent", sentence(needed, spec), small)
    free = available_bytes() if free_bytes is None else free_bytes
    if warning := shortage(spec, free):
        return Finding(
            "its memory",
            "absent",
            warning,
            "the needed memory is an estimate; train on a machine with more memory, or change the named keys",
        )
    return Finding("its memory", "ok", f"{sentence(needed, spec)}; {gigabytes(free)} are free on this machine")


def _too_small(spec: RunSpec, needed: Estimate, gpu_bytes: Sequence[int]) -> str:
    """Return which GPU has less memory than the GPU's roles need; empty if every GPU has enough."""
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
            return f"GPU {gpu} has {gigabytes(gpu_bytes[gpu])}, but its roles need {gigabytes(size)}"
    return ""


def _gpus_of_torch() -> list[int]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [int(torch.cuda.get_device_properties(index).total_memory) for index in range(torch.cuda.device_count())]


REMEDY = "only code rewards need a sandbox: install bubblewrap, or use a kernel with Landlock (docs/use/sandbox.md)"


def examine_sandbox(spec: RunSpec | None = None) -> list[Finding]:
    """Return the sandbox that works here and what it isolates; a `fault` if `spec` names a sandbox that does not work."""
    from paceline.reward.sandbox.choosing import report

    found = report()
    faults = [] if spec is None else _faults(spec)
    if not found.holding:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found.reasons.items())
        return [Finding("sandbox", "absent", f"no sandbox works ({reasons})", REMEDY), *faults]
    first, *others = found.holding
    value = first + (f"; {' and '.join(others)} work too" if len(others) > 1 else "")
    value += f"; {others[0]} works too" if len(others) == 1 else ""
    for name, reason in found.reasons.items():
        value += f"; {name} does not work: {reason}"
    return [
        Finding("sandbox", "ok", value),
        *(Finding(goal, "ok", means) for goal, means in found.means.items()),
        *faults,
    ]


def examine_user_code() -> Finding:
    """Return whether user code can be isolated on this machine, as `--require-isolation` demands."""
    why = why_no_isolation()
    if why:
        return Finding(
            "user code",
            "absent",
            f"not isolated: {why}",
            "docs/operate/security_promises.md describes the protection without isolation",
        )
    return Finding(
        "user code",
        "ok",
        "user code is isolated from other processes; a worker beyond loopback also hides secrets from it, by Landlock",
    )


def _faults(spec: RunSpec) -> list[Finding]:
    from paceline.reward.builtin import SETTINGS

    faults = []
    for index, reward in enumerate(spec.rewards):
        if reward.function == "code_tests" and spec.cluster.reward_workers:
            try:
                SETTINGS[reward.function](reward.kwargs).check_host()
            except InvalidInput as error:
                faults.append(Finding(f"rewards.{index}", "fault", str(error)))
    return faults


MIN_PYTHON = (3, 11)
MIN_FREE_BYTES = 5 << 30
GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    name: str
    status: Literal["ok", "absent", "fault"]
    """`absent`: an optional part is missing; `fault`: something has to be fixed."""
    value: str
    remedy: str = ""
    """Remedy for the part that is missing or faulty; empty if none is needed."""


def examine(directory: Path) -> list[Finding]:
    """Check everything that a run needs of this machine; `directory` is the folder for runs. Imports torch."""
    return [
        _python(),
        Finding("CPU", "ok", f"{usable_cores()} cores usable"),
        _memory(),
        _disk(directory),
        _ports(),
        _package("grpcio", "grpc"),
        _package("pyzmq", "zmq"),
        _package("transformers"),
        *_torch(),
        *_division(),
        _vllm(),
    ]


def _python() -> Finding:
    version = sys.version.split()[0]
    if sys.version_info < MIN_PYTHON:
        return Finding("Python", "fault", version, f"use Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer")
    return Finding("Python", "ok", f"{version}, {sys.executable}")


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    value = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    limit = _cgroup_limit_bytes()
    if limit is not None and limit < memory.total:
        value += f", but this container is limited to {limit / GIB:.1f} GiB"
    return Finding("memory", "ok", value)


def _cgroup_limit_bytes() -> int | None:
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _disk(directory: Path) -> Finding:
    """Check that runs can be kept in `directory`: write a file, and compare the free space with a checkpoint."""
    existing = directory.resolve()
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing) as probe:
            probe.write(b"probe")
    except OSError as error:
        return Finding(
            "directory",
            "fault",
            f"cannot write in {existing}: {error.strerror}",
            "name another folder with --directory",
        )
    free_bytes = shutil.disk_usage(existing).free
    value = f"{directory.resolve()} is writable, and {free_bytes / GIB:.1f} GiB are free"
    if free_bytes < MIN_FREE_BYTES:
        return Finding("directory", "absent", value, "free some space: checkpoints take 12 bytes for each parameter")
    return Finding("directory", "ok", value)


def _ports() -> Finding:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        return Finding("ports", "fault", f"cannot listen on 127.0.0.1: {error.strerror}", "allow loopback sockets")
    if not free_port("127.0.0.1", USUAL_PORT):
        return Finding("ports", "ok", f"port {USUAL_PORT} is taken (by a coordinator?), but other ports are free")
    return Finding("ports", "ok", f"port {USUAL_PORT} is free")


def _package(name: str, module: str | None = None) -> Finding:
    try:
        version = importlib.metadata.version(name)
        importlib.import_module(module or name)
    except ImportError as error:
        return Finding(name, "fault", str(error), f"pip install {name}")
    return Finding(name, "ok", version)


def _torch() -> list[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return [Finding("torch", "fault", str(error).splitlines()[0], "pip install torch")]
    findings = [Finding("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads")]
    with warnings.catch_warnings(record=True) as driver_warnings:  # torch reports an unsuitable driver as a warning
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        device = torch.cuda.get_device_properties(index)
        findings.append(Finding(f"GPU {index}", "ok", f"{device.name}, {device.total_memory / GIB:.0f} GiB"))
    if not count:
        findings.append(
            _no_gpu(torch.version.cuda, str(driver_warnings[-1].message).splitlines()[0] if driver_warnings else "")
        )
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        findings.append(Finding("gloo", "fault", "this torch has no gloo", "install a torch with torch.distributed"))
    if not count:
        findings.append(Finding("NCCL", "absent", "not needed without GPUs"))
    elif torch.distributed.is_nccl_available():
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        findings.append(Finding("NCCL", "ok", ".".join(str(part) for part in version)))
    else:
        findings.append(
            Finding(
                "NCCL",
                "fault",
                "this torch has no NCCL, but several learner ranks on GPUs need it",
                "install a CUDA build of torch",
            )
        )
    return findings


def _no_gpu(built_for: str | None, warning: str) -> Finding:
    """Return why torch sees no GPU: there is none, the build is for CPUs, or the driver is unsuitable."""
    if not Path("/dev/nvidiactl").exists():
        return Finding("GPU", "absent", "this machine has no GPU", "small models train on the CPU; see `paceline demo`")
    if built_for is None:
        return Finding(
            "GPU",
            "fault",
            "this machine has a GPU, but this torch is a build for CPUs",
            "install a CUDA build of torch, see pytorch.org",
        )
    remedy = "compare the driver (nvidia-smi) with the CUDA version of torch, and check CUDA_VISIBLE_DEVICES"
    return Finding(
        "GPU", "fault", f"torch for CUDA {built_for} cannot use the GPU: {warning or 'no reason given'}", remedy
    )


def _division() -> list[Finding]:
    """Return how `paceline up` would divide the GPUs of this machine for a spec that names none."""
    from paceline.services.common.gpus import divide, visible_gpus
    from paceline.spec import ClusterSection

    _, sentence = divide(ClusterSection(), len(visible_gpus()))
    return [Finding("paceline up", "ok", sentence)] if sentence else []


def _vllm() -> Finding:
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            "vllm",
            "absent",
            "vLLM is not installed; rollouts can use the native engine",
            "pip install 'paceline[vllm]' for GPUs",
        )
    return Finding("vllm", "ok", version)

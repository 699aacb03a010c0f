"""Checks of this machine: its hardware and software, and the remedy for what is missing. Each finding is tested, not
guessed; nothing is changed."""

from __future__ import annotations

import importlib
import importlib.metadata
import shutil
import socket
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.host.memory import usable_cores

MIN_PYTHON = (3, 11)
MIN_FREE_BYTES = 5 << 30
USUAL_PORT = 7070
GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    status: Literal["ok", "absent", "fault"]
    """`absent` is an optional part that is missing; a `fault` has to be fixed."""
    value: str
    remedy: str = ""
    """Advice, where there is something to do."""


def examine(directory: Path) -> list[Finding]:
    """Check everything that a run needs of this machine; `directory` is where runs would be kept. Imports torch."""
    return [
        _python(),
        _processor(),
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


def _processor() -> Finding:
    return Finding("CPU", "ok", f"{usable_cores()} cores usable")


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    value = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    limit = _cgroup_limit_bytes()
    if limit is not None and limit < memory.total:
        value += f", this container is limited to {limit / GIB:.1f} GiB"
    return Finding("memory", "ok", value)


def _cgroup_limit_bytes() -> int | None:
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _disk(directory: Path) -> Finding:
    """Check whether runs can be kept there: a file is really written, and the free space is enough for a checkpoint."""
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
            "name another one with --directory",
        )
    free_bytes = shutil.disk_usage(existing).free
    value = f"{directory.resolve()} is writable, {free_bytes / GIB:.1f} GiB free"
    if free_bytes < MIN_FREE_BYTES:
        return Finding("directory", "absent", value, "make room: checkpoints are 12 bytes for each parameter")
    return Finding("directory", "ok", value)


def _ports() -> Finding:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        return Finding(
            "ports", "fault", f"cannot listen on 127.0.0.1: {error.strerror}", "allow loopback sockets"
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", USUAL_PORT))
        except OSError:
            return Finding("ports", "ok", f"port {USUAL_PORT} is taken (a coordinator?), others are free")
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
    with warnings.catch_warnings(
        record=True
    ) as driver_warnings:  # torch reports a driver that does not fit as a warning
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        device = torch.cuda.get_device_properties(index)
        findings.append(Finding(f"GPU {index}", "ok", f"{device.name}, {device.total_memory / GIB:.0f} GiB"))
    if not count:
        findings.append(
            _no_gpu(
                torch.version.cuda,
                str(driver_warnings[-1].message).splitlines()[0] if driver_warnings else "",
            )
        )
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        findings.append(
            Finding("gloo", "fault", "this torch has no gloo", "install a torch with torch.distributed")
        )
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
                "this torch has none, and several learner ranks on GPUs need it",
                "install a CUDA build of torch",
            )
        )
    return findings


def _no_gpu(built_for: str | None, warning: str) -> Finding:
    """Return why torch sees no GPU: there is none, the build is for CPUs, or the driver does not fit."""
    if not Path("/dev/nvidiactl").exists():
        return Finding(
            "GPU", "absent", "none in this machine", "small models train on the CPU; see `paceline demo`"
        )
    if built_for is None:
        return Finding(
            "GPU",
            "fault",
            "there is one, but this torch is a build for CPUs",
            "install a CUDA build, see pytorch.org",
        )
    remedy = "compare the driver (nvidia-smi) with it and look at CUDA_VISIBLE_DEVICES"
    return Finding(
        "GPU", "fault", f"torch for CUDA {built_for} cannot use it: {warning or 'no reason given'}", remedy
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
            "vllm", "absent", "not installed; the native engine is", "pip install 'paceline[vllm]' for GPUs"
        )
    return Finding("vllm", "ok", version)

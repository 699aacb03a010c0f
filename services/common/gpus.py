"""Finds the GPUs of this host, and divides them among the processes of `paceline up`; imports nothing heavy, not even
torch.

Promise: a host with GPUs never trains on CPUs silently. If a spec names no GPUs, they are divided by a rule that is
shown on the screen. A GPU has the number that CUDA has for it here: its index in CUDA_VISIBLE_DEVICES if that variable
is set.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paceline.errors import SpecError, Unavailable, counted
from paceline.spec import ClusterSection

ROLES = ("learner", "rollout", "reward")
"""Roles with a key `ROLE_gpus` in the section `cluster`."""
LISTING_S = 20.0
"""Longest time in seconds for `nvidia-smi -L`, which may have to wake the driver."""
NVIDIA_FOLDER = Path("/proc/driver/nvidia/gpus")


def installed_gpus(folder: Path = NVIDIA_FOLDER, devices: Path = Path("/dev")) -> int:
    """Return how many GPUs the driver shows, visible to CUDA or not."""
    if (listed := _nvidia_smi("-L")) is not None:
        return len(re.findall(r"^GPU \d+:", listed, re.MULTILINE))
    try:
        return len(list(folder.iterdir()))
    except OSError:
        return len([path for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()])


def memory_of_gpus() -> tuple[int, ...]:
    """Return the memory in bytes of each GPU that the driver shows; empty if `nvidia-smi` does not report it."""
    listed = _nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    try:
        return tuple(int(line) << 20 for line in (listed or "").split())
    except ValueError:
        return ()


def _nvidia_smi(*options: str) -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        command = [program, *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=LISTING_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def visible_gpus(
    environment: Mapping[str, str] = os.environ, installed: Callable[[], int] = installed_gpus
) -> tuple[str, ...]:
    """Return the GPUs that CUDA would show to this process, by their names in CUDA_VISIBLE_DEVICES."""
    number = installed()
    names = environment.get("CUDA_VISIBLE_DEVICES")
    if names is None or not number:
        return tuple(str(gpu) for gpu in range(number))
    visible: list[str] = []
    for name in (part.strip() for part in names.split(",")):
        is_number = name.isdecimal()
        if (is_number and int(name) >= number) or (not is_number and not name.startswith(("GPU-", "MIG-"))):
            break  # as in CUDA: the first name that does not exist ends the list
        visible.append(name)
    return tuple(visible)


def torch_is_for_cpus() -> bool:
    """Return whether the installed torch is a build without CUDA and ROCm. One file is read, and torch is not imported."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        try:
            text = (Path(folder) / "version.py").read_text()
        except OSError:
            continue
        built_for = re.findall(r"^(?:cuda|hip)\b[^=\n]*=\s*(.+)$", text, re.MULTILINE)
        return bool(built_for) and all(value.strip() == "None" for value in built_for)
    return False


def usable_gpus() -> tuple[str, ...]:
    """Return the GPUs of `visible_gpus` that torch can use; none with a build of torch for CPUs."""
    return () if torch_is_for_cpus() else visible_gpus()


def named_in(cluster: ClusterSection) -> tuple[int, ...]:
    return (*cluster.rollout_gpus, *cluster.learner_gpus, *cluster.reward_gpus)


def divide(cluster: ClusterSection, number: int, *, rollout: bool = True) -> tuple[ClusterSection, str]:
    """Return the `cluster` section with `number` GPUs divided among its roles, and a sentence about the division (empty
    without GPUs). If the spec names GPUs, they stay, and the sentence names each role that computes on CPUs. Otherwise
    all roles share a single GPU; of several GPUs the learner gets half, one for each rank, and the rollout workers get
    the rest; without `rollout` the learner gets all. Numbers of ranks and workers that the spec does not set become the
    numbers of their GPUs. Raises SpecError, with the keys to set, if no division is possible."""
    if cluster.device == "cpu":
        unused = f"cluster.device is cpu, which leaves {counted(number, 'GPU')} of this host unused" if number else ""
        return cluster, unused
    if named_in(cluster):
        if missing := missing_gpus(cluster, number):
            raise SpecError(missing)
        return cluster, _left_on_cpus(cluster, number, rollout)
    if not number:
        return cluster, ""
    divided = _divided(cluster, number, rollout)
    return divided, _sentence(divided, number, rollout)


def missing_gpus(cluster: ClusterSection, number: int) -> str:
    """Return an error about the first named GPU that a host with `number` GPUs lacks, with the remedy; empty if it
    lacks none."""
    for role in ROLES:
        for gpu in _gpus_of(cluster, role):
            if gpu >= number:
                return (
                    f"the spec asks for GPU {gpu} (counted from 0; cluster.{role}_gpus), but this host shows {counted(number, 'GPU')}; "
                    f"see `paceline doctor` and CUDA_VISIBLE_DEVICES, name other GPUs, or set cluster.{role}_gpus=[] for CPUs"
                )
    return ""


def refuse_cpu(cluster: ClusterSection, role: str, sees: str = "torch finds no GPU in this process") -> None:
    """Refuse to compute a run on CPUs if its spec names GPUs for the role. `sees` describes the GPUs of this process.
    Raises Unavailable, because another process of the role may have the GPUs."""
    if gpus := _gpus_of(cluster, role):
        raise Unavailable(
            f"the run asks for {_numbers(gpus)} (cluster.{role}_gpus), but {sees}; see `paceline doctor`, or set "
            f"cluster.{role}_gpus=[] for CPUs"
        )


def _gpus_of(cluster: ClusterSection, role: str) -> tuple[int, ...]:
    gpus: tuple[int, ...] = getattr(cluster, f"{role}_gpus")
    return gpus


def _left_on_cpus(cluster: ClusterSection, number: int, rollout: bool) -> str:
    gpus = {"learner": cluster.learner_gpus} | ({"rollout": cluster.rollout_gpus} if rollout else {})
    without = [role for role, named in gpus.items() if not named]
    if not without:
        return ""
    return (
        f"{without[0]} computes on CPUs: cluster.{without[0]}_gpus is empty and other keys name GPUs; this host shows "
        f"{counted(number, 'GPU')}"
    )


def unused_gpus(role: str, visible: Sequence[str] | None = None) -> str:
    """Return a warning for a service that chose the CPU although this host has GPUs; empty if this host has no GPU."""
    number = len(visible_gpus() if visible is None else visible)
    if not number:
        return ""
    return (
        f"this {role} computes on CPUs although the host shows {counted(number, 'GPU')}, because torch cannot use any GPU; see "
        "`paceline doctor`, or give --device cpu if CPUs are intended"
    )


def _divided(cluster: ClusterSection, number: int, rollout: bool) -> ClusterSection:
    set_keys = cluster.model_fields_set
    shares = rollout and number > 1
    room = number - 1 if shares else number
    ranks = cluster.learner_ranks if "learner_ranks" in set_keys else max(1, number // 2 if shares else number)
    if ranks > room:
        raise SpecError(
            f"cluster.learner_ranks is {ranks} on a host with {counted(number, 'GPU')}: each rank needs a GPU"
            f"{' and the rollout workers need another GPU' if shares else ''}; lower the ranks, name GPUs in cluster.learner_gpus and "
            "cluster.rollout_gpus, or set cluster.device to cpu"
        )
    learner = tuple(range(ranks))
    changed: dict[str, object] = {"learner_ranks": ranks, "learner_gpus": learner}
    if rollout:
        left = tuple(range(ranks, number)) if shares else (0,)
        workers = cluster.rollout_workers if "rollout_workers" in set_keys else len(left)
        fitting = next(n for n in range(len(left), 0, -1) if n % workers == 0 or workers % n == 0)
        changed |= {"rollout_workers": workers, "rollout_gpus": left[:fitting]}
    return cluster.model_copy(update=changed)


def _sentence(cluster: ClusterSection, number: int, rollout: bool) -> str:
    parts = [f"learner {_numbers(cluster.learner_gpus)} (one for each rank)"]
    if rollout:
        parts.append(f"rollout {_numbers(cluster.rollout_gpus)} ({counted(cluster.rollout_workers, 'worker')})")
    idle = number - len({*cluster.learner_gpus, *cluster.rollout_gpus})
    if idle:
        parts.append(f"{idle} left idle")
    return (
        f"{counted(number, 'GPU')} on this host: {', '.join(parts)}; set cluster.learner_gpus and cluster.rollout_gpus to divide them "
        "otherwise, or cluster.device=cpu to use no GPU"
    )


def share_gpus(gpus: tuple[int, ...], workers: int, role: str = "rollout") -> list[tuple[int, ...]]:
    """Return the GPUs of each worker: equal parts, or one GPU for several workers. Raises SpecError if neither fits."""
    if not gpus:
        return [()] * workers
    if len(gpus) % workers == 0:
        each = len(gpus) // workers
        return [gpus[index * each : (index + 1) * each] for index in range(workers)]
    if workers % len(gpus) == 0:
        return [(gpus[index % len(gpus)],) for index in range(workers)]
    raise SpecError(
        f"cluster.{role}_gpus has {len(gpus)} GPUs for cluster.{role}_workers {workers}; one number must divide "
        "the other"
    )


def learner_gpus(cluster: ClusterSection) -> tuple[int, ...]:
    """Return a GPU for each rank, or no GPUs. Raises SpecError if the spec names another number of GPUs than ranks."""
    if cluster.learner_gpus and len(cluster.learner_gpus) != cluster.learner_ranks:
        raise SpecError(
            f"cluster.learner_gpus has {len(cluster.learner_gpus)} GPUs for cluster.learner_ranks "
            f"{cluster.learner_ranks}; each rank needs a GPU"
        )
    return cluster.learner_gpus


def for_cuda(gpus: Sequence[int], visible: Sequence[str]) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES for a process with `gpus`, from the names in `visible`."""
    return ",".join(visible[gpu] if gpu < len(visible) else str(gpu) for gpu in gpus)


def _numbers(gpus: Sequence[int]) -> str:
    return "GPU " + (f"{gpus[0]}" if len(gpus) == 1 else f"{gpus[0]} to {gpus[-1]}")

"""Finds the resources of this host for a run: memory, GPUs, services of each role, and the spec's local files."""

from __future__ import annotations

import glob
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

from paceline.data.rows import names_files
from paceline.errors import SpecError
from paceline.files.storage import is_url
from paceline.host.resources import available_bytes
from paceline.models.memory_plan import Room, planned, refusal
from paceline.models.shape import read_config, read_shape
from paceline.services.common.gpus import divide, memory_of_gpus, usable_gpus
from paceline.spec import ClusterSection, RewardFunctionSection, RunSpec
from paceline.spec.faults import nearest
from paceline.spec.reading import MODEL_FIELDS, code_paths, file_of


def room_here() -> Room:
    """Return the memory in bytes of this host's smallest GPU, None if torch can use none, and the host's free memory."""
    sizes = memory_of_gpus() if usable_gpus() else ()
    return Room(min(sizes, default=None), available_bytes())


def cluster_here(spec: RunSpec) -> tuple[RunSpec, str]:
    """Return the spec with the GPUs of this host divided as by `paceline up`, and a sentence about it. The spec is
    unchanged if it names GPUs, or the size of other hosts' GPUs (`cluster.gpu_gb`)."""
    if spec.cluster.gpu_gb is not None or spec.cluster.learner_gpus or spec.cluster.rollout_gpus:
        return spec, ""
    cluster, division = divide(spec.cluster, len(usable_gpus()), rollout=spec.samples)
    return spec.model_copy(update={"cluster": cluster}), division


def planned_here(spec: RunSpec) -> tuple[RunSpec, list[str]]:
    """Return the spec with each `auto` replaced by a value for this host, and sentences on the chosen values. Raises
    SpecError if a GPU cannot hold its load; too little free memory of the host gives only a warning, because free
    memory changes (`paceline.models.memory_estimate.shortage`)."""
    room, shape = room_here(), read_shape(spec.policy.model_name)
    spec, chosen = planned(spec, shape, room, has_vllm=importlib.util.find_spec("vllm") is not None)
    if shape is not None and (why_not := refusal(spec, shape, Room(gpu_bytes=room.gpu_bytes))):
        raise SpecError(why_not)
    return spec, chosen


def sizes_for(specs: Sequence[RunSpec]) -> ClusterSection:
    """Return the `cluster` section for the services that the runs need, from the first spec with rollouts. Runs on
    examples need no workers. Only runs with an environment need environment workers: the largest number that one of
    their specs names, where a spec without a number counts as 1."""
    sizes = next((spec.cluster for spec in specs if spec.samples), specs[0].cluster)
    if not any(spec.samples for spec in specs):
        none = {"rollout_workers": 0, "reward_workers": 0, "rollout_gpus": (), "reward_gpus": ()}
        return sizes.model_copy(update={**none, "environment_workers": 0})
    named = [spec.cluster.environment_workers for spec in specs if spec.environment.is_used]
    environment_workers = max((1 if number is None else number for number in named), default=0)
    if not named and sizes.environment_workers:
        environment_workers = sizes.environment_workers
    return sizes.model_copy(update={"environment_workers": environment_workers})


MODEL_TYPE = re.compile(r"[a-z0-9_]+")


def imports_of(specs: Sequence[RunSpec], sizes: ClusterSection) -> list[str]:
    """Return the modules that workers of these runs import, for the process from which they are forked. None of them
    has user code: a model's module is one of transformers. Empty if a run uses vLLM, which starts processes by
    itself."""
    if any(spec.samples and spec.policy.generation.backend == "vllm" for spec in specs):
        return []
    roles = [role for role in ("reward", "environment", "rollout") if getattr(sizes, f"{role}_workers")]
    modules = [f"paceline.services.{role}.main" for role in roles]
    if sizes.learner_ranks == 1:
        modules += [f"paceline.services.learner.{name}" for name in ("main", "rank", "training.run")]
    if not modules:
        return []
    modules += ["paceline.rollout.native.engine"] if "rollout" in roles else []
    kinds = [str((read_config(spec.policy.model_name) or {}).get("model_type")) for spec in specs]
    modules += [f"transformers.models.{kind}.modeling_{kind}" for kind in kinds if MODEL_TYPE.fullmatch(kind)]
    return list(dict.fromkeys(modules))


MAX_SIBLINGS = 1000
"""At most this many files of a folder are compared with a missing name."""


def check_paths_are_here(spec: RunSpec) -> None:
    """Raise SpecError with a line for each missing local path of a model, data file or code file."""
    missing = missing_paths(spec)
    if missing:
        raise SpecError("\n".join(missing))


def missing_paths(spec: RunSpec) -> list[str]:
    """Return a sentence for each missing local path of a spec. Names of a hub and URLs are not checked."""
    return [*_models(spec), *_data(spec), *_functions(spec)]


def _models(spec: RunSpec) -> list[str]:
    found = []
    for section, key in MODEL_FIELDS:
        name = getattr(getattr(spec, section), key)
        if name is None or is_url(name) or name.startswith("run:"):
            continue
        path = Path(name).expanduser()
        if (path.is_absolute() or name.startswith(".")) and not path.is_dir():
            found.append(f"{section}.{key}: no folder {name!r}{_remedy(path)}")
    return found


def _data(spec: RunSpec) -> list[str]:
    found = []
    for key in ("train", "validation"):
        value = getattr(spec.data, key)
        for name in value if isinstance(value, tuple) else (value,):
            if name is None or is_url(name) or not (names_files(name) or Path(name).is_absolute()):
                continue
            path = Path(spec.folder, name)
            if glob.has_magic(name):
                if not glob.glob(str(path), recursive=True):
                    found.append(f"data.{key}: no file matches {str(path)!r}; correct the pattern")
            elif not path.exists():
                found.append(f"data.{key}: no file {str(path)!r}{_remedy(path)}")
    return found


def _functions(spec: RunSpec) -> list[str]:
    found = []
    for name, code in code_paths(spec).items():
        file = Path(file_of(code))
        if file.is_absolute() and not file.is_file():
            found.append(f"{name}: no file {str(file)!r}{_remedy(file)}")
    for index, reward in enumerate(spec.rewards):
        argument = RewardFunctionSection.PATH_ARGUMENTS.get(reward.function)
        model = reward.kwargs.get(argument) if argument is not None else None
        if isinstance(model, str) and Path(model).is_absolute() and not Path(model).is_dir():
            found.append(f"rewards.{index}.kwargs.{argument}: no folder {model!r}{_remedy(Path(model))}")
    return found


def _remedy(path: Path) -> str:
    try:
        siblings = [each.name for each, _ in zip(path.parent.iterdir(), range(MAX_SIBLINGS), strict=False)]
    except OSError:
        return f", and no folder {str(path.parent)!r}; correct the path"
    close = nearest(path.name, siblings)
    return f"; did you mean {close[0]!r}?" if close else "; correct the path (paths are relative to the spec's folder)"

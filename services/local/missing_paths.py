"""The local files and folders that a spec names, checked where all services of a run are on this machine, before they start."""

from __future__ import annotations

import glob
from pathlib import Path

from paceline.data.rows import names_files
from paceline.errors import SpecError
from paceline.files.storage import is_url
from paceline.spec import RewardFunctionSection, RunSpec
from paceline.spec.faults import nearest
from paceline.spec.reading import MODEL_FIELDS, code_paths, file_of

MAX_SIBLINGS = 1000
"""Files of a folder that are compared with a name that is not there."""


def check_paths_are_here(spec: RunSpec) -> None:
    """Raises SpecError, a line for each local path of a model, data file or file of code that is not on this machine."""
    missing = missing_paths(spec)
    if missing:
        raise SpecError("\n".join(missing))


def missing_paths(spec: RunSpec) -> list[str]:
    """Return a sentence for each such path. Names of a hub and URLs are left to the workers, which read them."""
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
    """Return what to do about a path that is not there: the nearest name beside it, if one is near."""
    try:
        siblings = [each.name for each, _ in zip(path.parent.iterdir(), range(MAX_SIBLINGS), strict=False)]
    except OSError:
        return f", and no folder {str(path.parent)!r}; correct the path"
    close = nearest(path.name, siblings)
    return (
        f"; did you mean {close[0]!r}?"
        if close
        else "; correct the path (relative ones start at the spec's folder)"
    )

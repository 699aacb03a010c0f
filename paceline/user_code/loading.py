"""Loads the function or class in a user's file that a spec names as `path/to/file.py:name`. The module's name is made
from the path, so a user's `learner.py` shadows no module of this project, and equal file names do not collide."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from paceline.errors import InvalidInput, Unreadable, nearest
from paceline.user_code.box import why_refused


def load_from_file(path: Path, name: str, kind: str) -> Any:
    """Return the function or class `name` of a file. `kind` is its purpose in messages, as `reward function`. Raises
    InvalidInput for a file that fails to import (with its error) or lacks the name (with the nearest one), and for
    something that cannot be called; Unreadable if the file, or one that it imports, does not exist. Runs the user's
    module: call it only in a process that may run their code."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise Unreadable(f"{kind} {name!r}: there is no file {str(path)!r}; check the path in the spec")
    module = _module(path)
    loaded = getattr(module, name, None)
    if loaded is None:
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        existing = ", ".join(functions) or "none"
        noun = kind.rpartition(" ")[2]
        raise InvalidInput(f"{path} has no {noun} {name!r}{nearest(name, functions)}; it has {existing}")
    if not callable(loaded):
        raise InvalidInput(f"{name!r} in {path} is {type(loaded).__name__}, but a {kind} must be callable")
    return loaded


def _module(path: Path) -> ModuleType:
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    module_name = f"paceline_user_{path.stem}_{digest}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise InvalidInput(f"{path} is not a Python file; user code must be in a .py file")
    module = importlib.util.module_from_spec(spec)
    _find_neighbours_in(path.parent)
    sys.modules[module_name] = module  # dataclasses and pickle read the entry while the module runs
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        # A missing package or file may be added later; a fault of the file itself stays.
        kind = Unreadable if isinstance(error, OSError | ImportError) else InvalidInput
        raise kind(f"{path} fails to import: {describe_error(error, path)}") from error
    return module


class NeighbourFinder(PathFinder):
    """Finds the files beside a user's file for its imports, after every other finder, so that they shadow nothing. A
    folder at the end of `sys.path` would shadow packages in editable mode, which are found after it."""

    folders: ClassVar[list[str]] = []

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the module `fullname` beside a user's file; None for a module inside a package."""
        return super().find_spec(fullname, cls.folders, target) if path is None else None


def _find_neighbours_in(folder: Path) -> None:
    if NeighbourFinder not in sys.meta_path:
        sys.meta_path.append(NeighbourFinder)
    if str(folder) not in NeighbourFinder.folders:
        NeighbourFinder.folders.append(str(folder))


def describe_error(error: BaseException, path: Path | None = None) -> str:
    """Return one line: the exception's type, the first line of its text, and the line that raised it, in file `path` if
    the error passed through it; then the box's reason for refusing a file, if that is the cause."""
    return _described(error, path) + why_refused(error)


def _described(error: BaseException, path: Path | None) -> str:
    lines = [line.strip() for line in "".join(traceback.format_exception_only(error)).splitlines() if line.strip()]
    if isinstance(error, SyntaxError):
        # Its own traceback ends in the importer, and its text begins with the source.
        return f"{lines[-1]} ({Path(error.filename or '?').name}:{error.lineno})"
    text = f"{lines[0]} …" if len(lines) > 1 else lines[0]
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if path is not None and frame.filename == str(path)] or frames[-1:]
    if not inside:
        return text
    frame = inside[-1]
    return f"{text} ({Path(frame.filename).name}:{frame.lineno} in {frame.name})"


def accepted_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments that a user's function takes (all if it has `**` or no signature), and the missing
    arguments."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return arguments, []
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and parameter.default is parameter.empty
        and name not in arguments
    ]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments, missing
    return {name: value for name, value in arguments.items() if name in parameters}, missing

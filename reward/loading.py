"""Loader of the function that a spec names: a built-in, or `path/to/file.py:function`.

A file is loaded under a module name made from its path, so a user's `learner.py` shadows no module of this project, and
two files of one name do not collide. Every fault of a function is reported before the first group is scored.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from paceline.errors import InvalidInput, Unreadable

RewardFunction = Callable[..., Any]
"""`f(prompts, completions, completion_ids=..., **columns) -> list[float | None]`, plain or async."""


def load_function(function: str, kwargs: Mapping[str, Any] | None = None) -> RewardFunction:
    """Return the function that `function` names, checked to take `kwargs`.

    Raises InvalidInput: unknown built-in (with the nearest name), a file that fails to import (with its error), no such
    function in it, something that cannot be called, kwargs that the function does not have; Unreadable: no such file, or
    one that it imports.
    Runs the user's module: call it only in a process that may run their code.
    """
    path, colon, name = function.rpartition(":")
    loaded = _from_file(Path(path), name) if colon else _builtin(function)
    if not colon and function in _settings():
        _settings()[function](dict(kwargs or {})).check_host()
    else:
        _check_kwargs(function, loaded, dict(kwargs or {}), takes_columns_only=not colon)
    return loaded


def _builtin(name: str) -> RewardFunction:
    from reward.builtin import BUILTIN_FUNCTIONS

    if name in BUILTIN_FUNCTIONS:
        return BUILTIN_FUNCTIONS[name]
    raise InvalidInput(
        f"reward function {name!r} is not built in{_nearest(name, BUILTIN_FUNCTIONS)}; built in are "
        f"{', '.join(sorted(BUILTIN_FUNCTIONS))}; your own is named path/to/file.py:function"
    )


def _settings() -> Mapping[str, Callable[[object], Any]]:
    from reward.builtin import SETTINGS

    return SETTINGS


def _from_file(path: Path, name: str) -> RewardFunction:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise Unreadable(
            f"reward function {name!r}: there is no file {str(path)!r}; check the path in the spec"
        )
    module = _module(path)
    found = getattr(module, name, None)
    if found is None:
        functions = [
            key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
        ]
        existing = ", ".join(functions) or "none"
        raise InvalidInput(f"{path} has no function {name!r}{_nearest(name, functions)}; it has {existing}")
    if not callable(found):
        raise InvalidInput(
            f"{name!r} in {path} is {type(found).__name__}, a reward function has to be callable"
        )
    return found  # type: ignore[no-any-return]


def _module(path: Path) -> ModuleType:
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    module_name = f"paceline_user_{path.stem}_{digest}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise InvalidInput(f"{path} is not a Python file; a reward function lives in a .py file")
    module = importlib.util.module_from_spec(spec)
    _find_neighbours_in(path.parent)
    sys.modules[module_name] = module  # dataclasses and pickle look the module up while it runs
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        # A missing package or file may still come; a fault of the file itself stays.
        kind = Unreadable if isinstance(error, OSError | ImportError) else InvalidInput
        raise kind(f"{path} fails to import: {describe_error(error, path)}") from error
    return module


class NeighbourFinder(PathFinder):
    """Finder that lets a user's file import the files beside it. It comes after every other finder, so they shadow nothing.

    A folder at the end of `sys.path` would not do, because packages installed in editable mode are found after that.
    """

    folders: ClassVar[list[str]] = []

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module of that name in one of the folders; None for a module inside a package."""
        return super().find_spec(fullname, cls.folders, target) if path is None else None


def _find_neighbours_in(folder: Path) -> None:
    if NeighbourFinder not in sys.meta_path:
        sys.meta_path.append(NeighbourFinder)
    if str(folder) not in NeighbourFinder.folders:
        NeighbourFinder.folders.append(str(folder))


def describe_error(error: BaseException, path: Path | None = None) -> str:
    """Return one line: the exception's type, the first line of its text, and where it was raised, in file `path` if it
    passed through there."""
    lines = [
        line.strip() for line in "".join(traceback.format_exception_only(error)).splitlines() if line.strip()
    ]
    if isinstance(
        error, SyntaxError
    ):  # its own traceback ends in the importer, and its text begins with the source
        return f"{lines[-1]} ({Path(error.filename or '?').name}:{error.lineno})"
    text = f"{lines[0]} …" if len(lines) > 1 else lines[0]
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if path is not None and frame.filename == str(path)] or frames[-1:]
    if not inside:
        return text
    frame = inside[-1]
    return f"{text} ({Path(frame.filename).name}:{frame.lineno} in {frame.name})"


def _check_kwargs(
    function: str, loaded: RewardFunction, kwargs: dict[str, Any], takes_columns_only: bool
) -> None:
    """Check that the function takes `kwargs`. With `takes_columns_only` its `**` is for columns, as of a built-in, so a
    misspelt setting is refused."""
    try:
        parameters = inspect.signature(loaded).parameters
    except (TypeError, ValueError):  # a callable written in C has no signature
        return
    settings = [n for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    catches_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if takes_columns_only:
        settings = [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
        for name in settings:
            if parameters[name].default is inspect.Parameter.empty and name not in kwargs:
                raise InvalidInput(f"reward function {function!r} needs {name!r} in its kwargs")
    if takes_columns_only or not catches_all:
        for name in kwargs:
            if name not in settings:
                raise InvalidInput(
                    f"reward function {function!r} takes no {name!r}{_nearest(name, settings)}; "
                    f"its kwargs are {', '.join(settings) or 'none'}"
                )


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f", did you mean {close[0]!r}?" if close else ""

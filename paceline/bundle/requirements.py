"""The modules that reward functions need beyond the standard library and Paceline's own dependencies."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable, Sequence

from paceline.errors import Unreadable

DISTRIBUTION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_requirements(requirements: Sequence[str]) -> None:
    """Raises Unreadable with the names of modules that cannot be imported in this process' environment. No module is
    imported but the packages that hold a dotted one."""
    missing = [name for name in requirements if not _is_there(name)]
    if missing:
        raise Unreadable(
            f"bundle.requirements names {', '.join(map(repr, missing))}, which this worker does not have; install it where the "
            "worker runs, or remove it from the spec"
        )


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def undeclared(imported: Iterable[str], requirements: Sequence[str]) -> list[str]:
    """Return those of the imported top-level modules that are no dependency of Paceline and that `requirements` lacks."""
    declared = {name.partition(".")[0] for name in requirements}
    left = sorted(name for name in set(imported) - declared)
    own = _own_modules() if left else set()
    return [name for name in left if name not in own]


def _own_modules() -> set[str]:
    """Return the top-level modules of Paceline and of everything that it depends on."""
    seen: set[str] = set()
    waiting = ["paceline"]
    while waiting:
        name = _normal(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for requirement in required:
            found = DISTRIBUTION.match(requirement)
            if found is not None and "extra ==" not in requirement:
                waiting.append(found.group())
    modules = importlib.metadata.packages_distributions()
    return {module for module, names in modules.items() if any(_normal(name) in seen for name in names)}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()

"""Finds the modules that a Python file imports, without running it: files in its folder, transitively, and the names of
all other modules. Also finds the names that neither the standard library nor Paceline's dependencies provide. A
package is taken whole, because its modules may import each other by names that no parser sees. Names are resolved
like in the loader of reward functions: from the folder of the file that the spec names."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import Unreadable

MAX_SOURCE_BYTES = 4 << 20
"""Largest size in bytes of a file that is parsed; the imports of a larger file are ignored."""


@dataclass
class Imports:
    files: set[Path] = field(default_factory=set)
    """The parsed file, and all files in its folder that the file imports, also indirectly."""
    others: dict[str, Path] = field(default_factory=dict)
    """Maps each imported top-level module outside of the folder and the standard library to a file that imports it."""


def imports_of(file: Path) -> Imports:
    """Return the imports of `file` and of all modules that it imports from its folder. A file that cannot be parsed has
    none, because the process that loads it reports its fault. Raises OSError for an unreadable file."""
    found, waiting = Imports({file}), [file]
    while waiting:
        source = waiting.pop()
        for name in _imported(source, file.parent):
            beside = _beside(file.parent, name)
            new = beside - found.files
            found.files |= new
            waiting += sorted(path for path in new if path.suffix == ".py")
            top = name.partition(".")[0]
            if not beside and top not in sys.stdlib_module_names:
                found.others.setdefault(top, source)
    return found


def literal_files(file: Path) -> set[str]:
    """Return the string literals of a Python file that name other files in its folder: its code may read these files
    when it runs."""
    return {
        node.value
        for node in ast.walk(_parsed(file))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _names_a_file(file.parent, node.value)
    }


def _names_a_file(folder: Path, text: str) -> bool:
    if not 0 < len(text) <= 255 or not text.isprintable() or Path(text).is_absolute() or ".." in Path(text).parts:
        return False
    try:
        return (folder / text).is_file()
    except OSError:
        return False


def _parsed(file: Path) -> ast.Module:
    """Return the syntax tree of a file; an empty tree if the file cannot be parsed."""
    empty = ast.Module(body=[], type_ignores=[])
    if file.stat().st_size > MAX_SOURCE_BYTES:
        return empty
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return empty


def _imported(file: Path, root: Path) -> Iterator[str]:
    """Yield the absolute names of the modules that a file imports; for `from a import b` also `a.b`."""
    package = ".".join(file.parent.relative_to(root).parts)
    for node in ast.walk(_parsed(file)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = _absolute(package, module or "", level)
                if base:
                    yield base
                    yield from (f"{base}.{alias.name}" for alias in names if alias.name != "*" and level)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ) if name and not name.startswith("."):
                yield name


def _absolute(package: str, module: str, level: int) -> str:
    """Return the absolute name of a module that is imported relative to a package `level` levels up."""
    if not level:
        return module
    parts = package.split(".") if package else []
    kept = parts[: len(parts) - (level - 1)] if level - 1 <= len(parts) else []
    return ".".join([*kept, *([module] if module else [])])


def _beside(root: Path, name: str) -> set[Path]:
    """Return the files of a module in `root`: all files of a package, none if `root` does not have the module."""
    top = name.partition(".")[0]
    if not top.isidentifier():
        return set()
    package = root / top
    if (package / "__init__.py").is_file() or (package.is_dir() and any(package.glob("*.py"))):
        return {path for path in package.rglob("*") if path.suffix in (".py", ".so", ".pyi") and _is_source(path, root)}
    if (root / f"{top}.py").is_file():
        return {root / f"{top}.py"}
    return set(root.glob(f"{top}.*.so"))


def _is_source(path: Path, root: Path) -> bool:
    return not any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(root).parts)


DISTRIBUTION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_requirements(requirements: Sequence[str]) -> None:
    """Raise Unreadable with the modules that this process cannot import. The check of `a.b` imports only `a`."""
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
    """Return the imported top-level modules that are neither dependencies of Paceline nor in `requirements`."""
    declared = {name.partition(".")[0] for name in requirements}
    undeclared_names = sorted(name for name in set(imported) - declared)
    dependencies = _own_modules() if undeclared_names else set()
    return [name for name in undeclared_names if name not in dependencies]


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

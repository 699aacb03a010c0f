"""The modules that a Python file imports, found without running it: those beside it, transitively, and all others by name.

A package is taken whole, because its modules may import each other by names that no parser sees. Names are resolved as the
loader of reward functions does it: from the folder of the file that the spec names.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MAX_SOURCE_BYTES = 4 << 20
"""Largest file that is parsed; a larger one is taken without what it imports."""


@dataclass
class Imports:
    """The imports of one file."""

    files: set[Path] = field(default_factory=set)
    """The file and everything beside it that it needs."""
    others: dict[str, Path] = field(default_factory=dict)
    """Top-level modules that are neither beside it nor in the standard library, each with a file that imports it."""


def imports_of(file: Path) -> Imports:
    """Return the imports of `file` and of all that it imports from its folder. A file that cannot be parsed has none: its
    fault is reported by the process that loads it. Raises OSError for a file that cannot be read."""
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
    """Return the texts in a file's source that name a file beside it: it may read them when it runs."""
    return {
        node.value
        for node in ast.walk(_parsed(file))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and _names_a_file(file.parent, node.value)
    }


def _names_a_file(folder: Path, text: str) -> bool:
    if (
        not 0 < len(text) <= 255
        or not text.isprintable()
        or Path(text).is_absolute()
        or ".." in Path(text).parts
    ):
        return False
    try:
        return (folder / text).is_file()
    except OSError:
        return False


def _parsed(file: Path) -> ast.Module:
    """Return the tree of a file; an empty one when it cannot be parsed."""
    empty = ast.Module(body=[], type_ignores=[])
    if file.stat().st_size > MAX_SOURCE_BYTES:
        return empty
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return empty


def _imported(file: Path, root: Path) -> Iterator[str]:
    """Yield the absolute names of the modules that a file imports; of `from a import b` also `a.b`, which may be one."""
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
    """Return the files of a module in `root`, a package's all; none for a module that is elsewhere."""
    top = name.partition(".")[0]
    if not top.isidentifier():
        return set()
    package = root / top
    if (package / "__init__.py").is_file() or (package.is_dir() and any(package.glob("*.py"))):
        return {
            path
            for path in package.rglob("*")
            if path.suffix in (".py", ".so", ".pyi") and _is_source(path, root)
        }
    if (root / f"{top}.py").is_file():
        return {root / f"{top}.py"}
    return set(root.glob(f"{top}.*.so"))


def _is_source(path: Path, root: Path) -> bool:
    return not any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(root).parts)

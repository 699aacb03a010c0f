"""The answer to a whole configuration of another library that is taken for a spec: `paceline import` makes one of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.spec.foreign.names import table
from paceline.spec.keys import keys

COMMANDS = {"trl": "trl", "nemo_rl": "nemo", "verl": "verl", "prime_rl": "prime-rl"}
"""Name of the library for `paceline import`, by the table of its names."""
SUFFIXES = {".py": "trl", ".toml": "prime-rl"}
"""Libraries whose configurations are no YAML, by the file's suffix."""
MIN_KEYS = 3
"""Keys of a library, and not ours, from which on the file is taken for a configuration of it."""
MAX_KEYS = 1000
COMMON_PREFIXES = ("actor_rollout_ref.",)
"""Beginnings of names that the tables may leave out."""


def import_hint(path: Path, tree: dict[str, Any]) -> str:
    """Return the sentence that names `paceline import`; empty for a spec of ours, mistakes included."""
    foreign = [name for name in _leaves(tree) if name not in keys()]
    found = {
        library: sum(name in table(library) or _without_prefix(name) in table(library) for name in foreign)
        for library in COMMANDS
    }
    library = max(found, key=lambda each: found[each])
    if found[library] < MIN_KEYS:
        return ""
    whose = next(iter(table(library).values())).library
    return f"{path} has {found[library]} keys of {whose}: `paceline import {COMMANDS[library]} {path}` writes a spec from it"


def hint_by_suffix(path: Path) -> str:
    """Return the sentence for a file that is no YAML by its suffix; empty for others."""
    library = SUFFIXES.get(path.suffix)
    return f"; `paceline import {library} {path}` writes a spec from it" if library else ""


def _without_prefix(name: str) -> str:
    for prefix in COMMON_PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _leaves(tree: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for name in _walk("", tree):
        found.append(name)
        if len(found) == MAX_KEYS:
            break
    return found


def _walk(above: str, value: Any, levels: int = 8) -> Iterator[str]:
    if not isinstance(value, dict) or not value or levels == 0:
        yield above.removesuffix(".")
        return
    for name, below in value.items():
        yield from _walk(f"{above}{name}.", below, levels - 1)

"""The spec that an import writes: YAML that loads, with what was left out above it as comments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from paceline.apps.importers import nemo_rl, prime_rl, python_script, sources, trl, verl
from paceline.apps.importers.conversion import Conversion
from paceline.errors import SpecError
from paceline.spec.reading import apply_override, parse_spec

LIBRARIES = ("trl", "nemo", "verl", "prime-rl")
MAX_LINE = 200
"""Characters of a comment."""
REQUIRED = {
    "policy.model_name": "policy.model_name=…",
    "data.train": "data.train=…",
    "rewards": "'rewards=[{function: …}]'",
}
"""Keys that a configuration may lack, and the override that gives them."""


def import_config(
    library: str, path: Path, overrides: tuple[str, ...] = (), *, processes: int = 1
) -> Conversion:
    """Return the conversion of the file at `path`, one of LIBRARIES, with overrides of our keys on top; it loads.

    Raises SpecError: the file cannot be read, lacks a key that every spec needs, or has values that contradict each other.
    """
    if not path.is_file():
        raise SpecError(f"no file {str(path)!r}; name a configuration of {library}")
    done = _converted(library, path, processes)
    done.close()
    for override in overrides:
        apply_override(done.tree, override)
    _check_complete(done, path)
    try:
        parse_spec(done.tree, base=path.resolve().parent)
    except SpecError as error:
        raise SpecError(
            f"{path} gives a spec that does not load; repeat with overrides, such as section.key=value, for\n{error}"
        ) from None
    return done


def spec_text(done: Conversion, source: Path) -> str:
    """Return the spec as YAML below comments: its source, notes, and what was left out."""
    lines = [f"# From {source.name}, by `paceline import`."]
    lines += [f"# Note: {note}" for note in done.notes]
    lines += [f"# Left out: {line}" for line in done.left_out]
    comments = "\n".join(_one_line(line) for line in lines)
    body = yaml.safe_dump(
        _ordered(done.tree), sort_keys=False, allow_unicode=True, width=110, default_flow_style=None
    )
    return f"{comments}\n{body}"


def _converted(library: str, path: Path, processes: int) -> Conversion:
    try:
        if library == "trl" and path.suffix == ".py":
            script = python_script.read_script(path)
            done = trl.convert(script.settings, processes=processes, algorithm=script.algorithm)
            done.notes = [*script.notes, *done.notes]
            done.files |= script.files
            return done
        if library == "trl":
            return trl.convert(sources.read_yaml(path, "trl"), processes=processes)
        if library == "nemo":
            return nemo_rl.convert(sources.read_yaml(path, "nemo_rl"))
        if library == "prime-rl":
            return prime_rl.convert(sources.read_toml(path, "prime_rl"))
        is_yaml = path.suffix in (".yaml", ".yml")
        return verl.convert(sources.read_yaml(path, "verl") if is_yaml else sources.read_overrides(path))
    except UnicodeError:
        raise SpecError(f"{path} is not text in UTF-8; name a configuration of {library}") from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError, RecursionError) as error:
        raise SpecError(f"{path} has a value of another type than {library} reads: {error}") from None


def _check_complete(done: Conversion, path: Path) -> None:
    """Raise SpecError with the overrides to add for keys that the configuration lacks."""
    needs = [key for key in REQUIRED if key != "rewards" or done.algorithm == "grpo"]
    lacking = [key for key in needs if not _value(done.tree, key)]
    if lacking:
        raise SpecError(
            f"{path} does not say {' and '.join(lacking)}; add {' '.join(REQUIRED[key] for key in lacking)} to the command"
        )


def _value(tree: dict[str, Any], key: str) -> Any:
    node: Any = tree
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _ordered(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the sections in the order of the spec."""
    from paceline.spec.keys import keys_of

    return {name: tree[name] for name in keys_of("") if name in tree}


def _one_line(text: str) -> str:
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 1]}…"

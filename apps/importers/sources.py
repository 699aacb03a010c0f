"""Configurations as their libraries write them: YAML with `defaults` and `${…}`, TOML with `toml_files`, and overrides in a
shell script."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from paceline.apps.importers.conversion import flattened, listed
from paceline.errors import SpecError
from paceline.spec.reading import read_tree

MAX_DEFAULTS = 8
"""Files that `defaults` may chain."""
MAX_BYTES = 1 << 20
_REFERENCE = re.compile(r"\$\{([A-Za-z_.][\w.]*)\}")
_PRODUCT = re.compile(r"\$\{mul:\s*(\d+)\s*,\s*(\d+)\s*\}")
_OVERRIDE = re.compile(r"^[+~]{0,2}([A-Za-z_][\w.]*)=(.*)$", re.S)


def read_yaml(path: Path, library: str) -> dict[str, Any]:
    """Return the settings of a YAML file by dotted name. Raises SpecError."""
    settings = flattened(_with_defaults(path, MAX_DEFAULTS), library)
    return {name: _resolved(value, name, settings) for name, value in settings.items()}


def read_overrides(path: Path) -> dict[str, Any]:
    """Return the `section.key=value` words of a shell script, with its own variables filled in. Raises SpecError."""
    text = path.read_text(encoding="utf-8")[:MAX_BYTES].replace("\\\n", " ")
    variables = dict(re.findall(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\S*)\s*$", text, re.M))
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise SpecError(f"{path} cannot be read as a shell script: {error}") from None
    found: dict[str, Any] = {}
    for word in words:
        match = _OVERRIDE.match(word)
        if match and "." in match[1]:
            filled = re.sub(r"\$\{?(\w+)\}?", lambda each: variables.get(each[1], each[0]), match[2])
            found[match[1]] = _scalar(filled)
    if not found:
        raise SpecError(
            f"{path} has no override such as data.train_files=train.parquet; name the YAML or the script"
        )
    return found


def read_toml(path: Path, library: str) -> dict[str, Any]:
    """Return the settings of a TOML file by dotted name, over those of the files that its `toml_files` names. Raises
    SpecError."""
    return flattened(_with_toml_files(path, MAX_DEFAULTS), library)


def _with_toml_files(path: Path, files_left: int) -> dict[str, Any]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8")[:MAX_BYTES])
    except OSError as error:
        raise SpecError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SpecError(f"{path} is not TOML: {error}") from None
    below: dict[str, Any] = {}
    for name in listed(tree.pop("toml_files", None)):
        if files_left == 0:
            raise SpecError(
                f"{path}: toml_files chain more than {MAX_DEFAULTS} files; write the settings into one"
            )
        below = _merged(below, _with_toml_files(path.parent / str(name), files_left - 1))
    return _merged(below, tree)


def _with_defaults(path: Path, files_left: int) -> dict[str, Any]:
    """Return the sections of a file over those of the file that its `defaults` names."""
    tree = read_tree(path)
    above = tree.pop("defaults", None)
    if isinstance(above, str):
        if files_left == 0:
            raise SpecError(
                f"{path}: defaults chain more than {MAX_DEFAULTS} files; write the settings into one"
            )
        return _merged(_with_defaults(path.parent / above, files_left - 1), tree)
    return tree


def _merged(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def _resolved(value: Any, name: str, settings: Mapping[str, Any], levels: int = 8) -> Any:
    """Return a value with its references filled in; None for one that refers to nothing that is known."""
    if isinstance(value, list):
        return [_resolved(each, name, settings, levels) for each in value]
    if not isinstance(value, str) or "${" not in value or levels == 0:
        return value

    def fill(match: re.Match[str]) -> str:
        target = match[1] if not match[1].startswith(".") else f"{name.rpartition('.')[0]}{match[1]}"
        found = _resolved(settings.get(target), target, settings, levels - 1)
        return "null" if found is None else str(found)

    filled = _PRODUCT.sub(lambda match: str(int(match[1]) * int(match[2])), _REFERENCE.sub(fill, value))
    return None if "${" in filled else _scalar(filled)


def _scalar(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text

"""Reads a `RunSpec` from YAML and dotted overrides; `paceline.spec.faults` explains faults.

`load_spec("grpo.yaml", ["grpo.num_prompts_per_step=16"])` does the work of `paceline submit`. Relative paths in a file
are relative to that file; folders that the run makes are relative to the working directory. The resolved spec holds
absolute paths, so that every service reads the same files.

For another library's configuration in place of a spec, the error suggests `paceline import`. `code_paths` finds all
files of user code in a spec, for bundles, permitted folders and checks before a start.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from paceline.errors import SpecError
from paceline.host.regular_file import open_regular
from paceline.spec import RewardFunctionSection, RunSpec, bounded_yaml
from paceline.spec.faults import explain, kind_of, unknown_key
from paceline.spec.foreign import look_up, table
from paceline.spec.keys import keys
from paceline.spec.sections.user_code import EnvironmentSection

MAX_PATH = 1024
MODEL_FIELDS = (
    ("policy", "model_name"),
    ("policy", "tokenizer_name"),
    ("distillation", "teacher_model_name"),
    ("value", "model_name"),
)
"""Fields that name a model or a tokenizer: a folder, an fsspec URL, a name on the hub, or `run:ID`."""
PATH_FIELDS = (*MODEL_FIELDS, ("data", "train"), ("data", "validation"), ("checkpointing", "checkpoint_dir"))
OUTPUT_FIELDS = (("checkpointing", "checkpoint_dir"), ("weights", "store"))
"""Fields with a folder that a run makes; the path is relative to the directory in which the spec is loaded."""


def load_spec(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> RunSpec:
    """Return the spec in YAML file `path` with `overrides` ("section.key=value") applied. Raises SpecError for a
    missing file, invalid YAML, an unknown key (with the nearest), a wrong type, a contradiction."""
    tree = read_tree(path)
    for override in overrides:
        apply_override(tree, override)
    try:
        return parse_spec(tree, base=Path(path).parent)
    except SpecError as error:
        if hint := import_hint(Path(path), tree):
            raise SpecError(f"{error}\n{hint}") from None
        raise


def read_tree(path: str | Path) -> dict[str, Any]:
    """Return the sections of YAML file `path`. Raises SpecError if the file is missing, not YAML or too large."""
    path = Path(path)
    try:
        with open_regular(path) as file:
            content = file.read(bounded_yaml.MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecError(f"cannot read the spec {str(path)[:200]!r}: {reason}; check the path") from None
    if len(content) > bounded_yaml.MAX_BYTES:
        raise SpecError(f"{path} has more than {bounded_yaml.MAX_BYTES} bytes; keep data in separate files")
    try:
        tree = yaml.load(content.decode(), bounded_yaml.StepwiseLoader)
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise SpecError(f"{path} is not valid YAML: {error}{hint_by_suffix(path)}") from None
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None
    except RecursionError:
        raise SpecError(f"{path} is nested more than {bounded_yaml.MAX_DEPTH} levels deep") from None
    if excess := bounded_yaml.excess(tree):
        raise SpecError(f"{path} {excess}")
    if not isinstance(tree, dict):
        raise SpecError(f"{path} {kind_of(tree)}, but a spec is a mapping of sections{hint_by_suffix(path)}")
    return tree


def parse_spec(tree: dict[str, Any], base: Path | None = None) -> RunSpec:
    """Return the spec in `tree`; relative paths that exist under `base` become absolute. Raises SpecError."""
    tree = _with_absolute_paths(tree, base) if base else tree
    try:
        return RunSpec.model_validate(tree)
    except ValidationError as error:
        raise SpecError(explain(error, tree.get("algorithm", "grpo"))) from None


def submitted_spec(text: str) -> RunSpec:
    """Return the spec in YAML `text` from a client, within the limits of `bounded_yaml`. Raises SpecError."""
    spec = parse_spec(_mapping(bounded_yaml.load(text)))
    _check_paths(spec)
    return spec


def _check_paths(spec: RunSpec) -> None:
    """Raise SpecError for a path that no file system accepts."""
    paths = {f"{section}.{key}": getattr(getattr(spec, section), key) for section, key in PATH_FIELDS}
    paths |= {f"rewards.{place}.function": reward.function for place, reward in enumerate(spec.rewards)}
    for name, value in paths.items():
        for path in value if isinstance(value, tuple) else (value,):
            if path is None or (len(path) <= MAX_PATH and path.isprintable()):
                continue
            raise SpecError(f"{name} is {path[:80]!r}, not a path of at most {MAX_PATH} printable characters")


def spec_from_yaml(text: str) -> RunSpec:
    """Return the spec in YAML `text` of an accepted run, from the ledger or a message to workers. Raises SpecError."""
    return parse_spec(_tree_of(text))


def _tree_of(text: str) -> dict[str, Any]:
    """Return the sections of an accepted run. A run without policy.shared_prompts was recorded before there was such a
    setting, and its sums are the same again only in rows that share no prompt."""
    tree = _yaml_of(text)
    if isinstance(policy := tree.get("policy"), dict):
        policy.setdefault("shared_prompts", False)
    return tree


def _yaml_of(text: str) -> dict[str, Any]:
    try:
        tree = yaml.load(text, bounded_yaml.StepwiseLoader)
    except yaml.YAMLError as error:
        raise SpecError(f"the spec is not valid YAML: {error}") from None
    except (ValueError, OverflowError, RecursionError) as error:  # a value that Python cannot represent
        raise SpecError(f"the spec has a value that cannot be read: {error}") from None
    return _mapping(tree)


def _mapping(tree: Any) -> dict[str, Any]:
    if not isinstance(tree, dict):
        raise SpecError(f"the spec {kind_of(tree)}, but it must be a mapping of sections")
    return tree


def spec_from_ledger(text: str) -> tuple[RunSpec, list[str]]:
    """Return the spec of a run accepted by any version, and a warning about the keys and the kinds of trackers that
    this version does not know; the ledger keeps them. Raises SpecError if the spec is invalid without them."""
    try:
        return spec_from_yaml(text), []
    except SpecError:
        tree = _tree_of(text)
        unknown = _remove_unknown(tree)
        if not unknown:
            raise
    keys = ", ".join(unknown)
    return parse_spec(tree), [f"this version does not know {keys} of the run's spec and ignores them"]


def spec_of_run(run_id: str, text: str) -> tuple[RunSpec, list[str]]:
    """Return the result of `spec_from_ledger` for a run. The SpecError names the run and the remedy."""
    try:
        return spec_from_ledger(text)
    except SpecError as error:
        faults = "; ".join(str(error).splitlines())
        raise SpecError(
            f"this version of Paceline cannot read the spec of run {run_id}: {faults}. Use the version that accepted the "
            f"run, or end the run with `paceline cancel {run_id}`"
        ) from None


def _remove_unknown(tree: dict[str, Any]) -> list[str]:
    """Remove unknown keys and unknown kinds of trackers from `tree`; return their dotted names."""
    try:
        RunSpec.model_validate(tree)
    except ValidationError as error:
        removed = []
        # last to first, so that list indices stay valid
        for item in reversed(error.errors()):
            if item["loc"][:2] == ("logger", "trackers") and item["loc"][3:] == ("kind",):
                item = {"type": "extra_forbidden", "loc": item["loc"][:3]}
            if item["type"] == "extra_forbidden":
                with contextlib.suppress(KeyError, IndexError, TypeError):  # a location that the tree does not have
                    node: Any = tree
                    for part in item["loc"][:-1]:
                        node = node[part]
                    del node[item["loc"][-1]]
                    removed.append(".".join(str(part) for part in item["loc"]))
        return removed[::-1]
    return []


def spec_to_yaml(spec: RunSpec) -> str:
    """Return the resolved spec as YAML, defaults included."""
    # libyaml if available: the Python one takes seconds for a megabyte and blocks other threads.
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(spec.model_dump(mode="json"), Dumper=dumper, sort_keys=False)
    return text


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set `a.b.c=value` in `tree`; the value is parsed as YAML, and list items have indices. Raises SpecError."""
    dotted, equals, raw = override.partition("=")
    if not equals or not dotted:
        raise SpecError(f"override {override!r} must look like section.key=value")
    if dotted.startswith(("+", "~")):
        raise SpecError(
            f"override {override!r} has Hydra's {dotted[0]!r}; write it without this, as {dotted.lstrip('+~')}={raw}"
        )
    keys = dotted.split(".")
    try:
        value = yaml.load(raw, bounded_yaml.StepwiseLoader)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError):
        raise SpecError(f"override {override[:200]!r}: the value {raw[:200]!r} is not valid YAML; quote it") from None
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d+)?[eE][+-]?\d+", value):
        value = float(value)  # YAML 1.1 reads 1e-6 as a string
    node: Any = tree
    for key in keys[:-1]:
        if isinstance(node, list):
            node = node[_index(node, key, override)]
        elif isinstance(node, dict):
            if node.get(key) is None:
                node[key] = {}
            node = node[key]
        else:
            raise _below_value(override, key)
    if isinstance(node, list):
        node[_index(node, keys[-1], override)] = value
    elif isinstance(node, dict):
        node[keys[-1]] = value
    else:
        raise _below_value(override, keys[-1])


def _below_value(override: str, key: str) -> SpecError:
    """Return the error for an override whose key is below a plain value, with our key for another library's name."""
    dotted = override.partition("=")[0]
    if look_up(dotted):
        return SpecError("\n".join(unknown_key(tuple(dotted.split(".")), None)))
    return SpecError(f"override {override!r}: {key!r} is below a plain value, not in a section")


def _index(node: list[Any], key: str, override: str) -> int:
    if not key.isdigit() or int(key) >= len(node):
        raise SpecError(f"override {override!r}: {key!r} must be an index below {len(node)}")
    return int(key)


def _with_absolute_paths(tree: dict[str, Any], base: Path) -> dict[str, Any]:
    tree = {key: dict(value) if isinstance(value, dict) else value for key, value in tree.items()}
    for section, key in dict.fromkeys((*PATH_FIELDS, *OUTPUT_FIELDS)):
        value = tree.get(section, {}).get(key) if isinstance(tree.get(section), dict) else None
        if isinstance(value, str):
            is_output = (section, key) in OUTPUT_FIELDS
            tree[section][key] = _absolute_output(value) if is_output else _absolute(value, base)
        elif isinstance(value, list | tuple):
            tree[section][key] = [_absolute(item, base) if isinstance(item, str) else item for item in value]
    tree.setdefault("folder", str(base.resolve()))
    rewards = tree.get("rewards")
    if isinstance(rewards, list | tuple):
        tree["rewards"] = [_with_absolute_function(item, base) for item in rewards]
    data = tree.get("data")
    if isinstance(data, dict) and isinstance(preparation := data.get("preparation"), dict):
        function = _absolute_code(preparation.get("function"), base)
        data["preparation"] = {**preparation, "function": function}
    environment = tree.get("environment")
    if isinstance(environment, dict):
        for key in environment.keys() & {*EnvironmentSection.PATH_ARGUMENTS, "class_"}:
            environment[key] = _absolute_code(environment[key], base)
    return tree


@contextlib.contextmanager
def _path_errors(value: str) -> Iterator[None]:
    """Raise SpecError for a path that no file system accepts, or whose home directory is unknown."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise SpecError(f"the path {value[:80]!r} cannot be used: {reason}; correct it") from None


def _absolute_code(code: Any, base: Path) -> Any:
    """Return `file:name`, or a list or mapping of them, with the file relative to `base` as an absolute path."""
    if isinstance(code, list | tuple):
        return [_absolute_code(each, base) for each in code]
    if isinstance(code, dict):
        return {name: _absolute_code(each, base) for name, each in code.items()}
    if not isinstance(code, str) or ":" not in code:
        return code
    file, _, name = code.rpartition(":")
    with _path_errors(file):
        return f"{(base / Path(file).expanduser()).resolve()}:{name}"


def _absolute(value: str, base: Path) -> str:
    """Return a path relative to `base` as an absolute one; any other string (a name on the hub) unchanged."""
    with _path_errors(value):
        is_glob = glob.has_magic(value) and "://" not in value and any(glob.iglob(str(base / value)))
        if value.startswith(("./", "../", "~")) or (base / value).exists() or is_glob:
            return str((base / Path(value).expanduser()).resolve())
    return value


def _absolute_output(value: str) -> str:
    """Return a folder relative to the working directory as an absolute path; a URL unchanged."""
    with _path_errors(value):
        return value if not value or "://" in value else os.path.abspath(Path(value).expanduser())


def _with_absolute_function(item: Any, base: Path) -> Any:
    function = item.get("function") if isinstance(item, dict) else None
    if not isinstance(function, str):
        return item
    kwargs, argument = item.get("kwargs"), RewardFunctionSection.PATH_ARGUMENTS.get(function)
    if argument is not None and isinstance(kwargs, dict) and isinstance(kwargs.get(argument), str):
        return {**item, "kwargs": {**kwargs, argument: _absolute(kwargs[argument], base)}}
    return {**item, "function": _absolute_code(function, base)}


COMMANDS = {"trl": "trl", "nemo_rl": "nemo", "verl": "verl", "prime_rl": "prime-rl"}
"""Argument of `paceline import` for each table of a library's names."""
SUFFIXES = {".py": "trl", ".toml": "prime-rl"}
"""For each suffix of a configuration file that is not YAML, the library that has such files."""
MIN_KEYS = 3
"""A file counts as a library's configuration if at least this many of its keys are the library's and not ours."""
MAX_KEYS = 1000
COMMON_PREFIX = "actor_rollout_ref."
"""Prefix of verl's names that the tables may leave out."""


def import_hint(path: Path, tree: dict[str, Any]) -> str:
    """Return the sentence that suggests `paceline import`; empty for a spec of ours, even with mistakes."""
    foreign = [name for name in islice(_walk("", tree), MAX_KEYS) if name not in keys()]
    counts = {
        library: sum(not table(library).keys().isdisjoint((name, name.removeprefix(COMMON_PREFIX))) for name in foreign)
        for library in COMMANDS
    }
    library = max(counts, key=lambda each: counts[each])
    if counts[library] < MIN_KEYS:
        return ""
    whose = next(iter(table(library).values())).library
    return f"{path} has {counts[library]} keys of {whose}: `paceline import {COMMANDS[library]} {path}` writes a spec from it"


def hint_by_suffix(path: Path) -> str:
    """Return the clause that suggests `paceline import` for a file with the suffix of another library; else empty."""
    library = SUFFIXES.get(path.suffix)
    return f"; `paceline import {library} {path}` writes a spec from it" if library else ""


def _walk(above: str, value: Any, levels: int = 8) -> Iterator[str]:
    if not isinstance(value, dict) or not value or levels == 0:
        yield above.removesuffix(".")
        return
    for name, below in value.items():
        yield from _walk(f"{above}{name}.", below, levels - 1)


def code_paths(spec: RunSpec) -> dict[str, str]:
    """Return a mapping from each field that names code to the field's `file:name`. Built-in functions have no file."""
    named = {f"rewards.{index}.function": reward.function for index, reward in enumerate(spec.rewards)}
    environment = spec.environment
    for name, each in environment.classes.items():
        named[f"environment.class.{name}" if name else "environment.class"] = each
    named |= {f"environment.tools.{index}": tool for index, tool in enumerate(environment.tools)}
    named |= {"environment.agent": environment.agent, "environment.train_call": environment.train_call}
    return {field: value for field, value in named.items() if ":" in value}


def file_of(code: str) -> str:
    return code.rpartition(":")[0]


def with_code_paths(spec: RunSpec, change: Callable[[str], str]) -> RunSpec:
    """Return the spec with `change` applied to each `file:name`."""

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: changed(each) for name, each in value.items()}
        if isinstance(value, tuple):
            return tuple(map(changed, value))
        return change(value) if ":" in value else value

    named = {name: changed(getattr(spec.environment, name)) for name in ("class_", "tools", "agent", "train_call")}
    rewards = tuple(r.model_copy(update={"function": changed(r.function)}) for r in spec.rewards)
    return spec.model_copy(update={"rewards": rewards, "environment": spec.environment.model_copy(update=named)})

"""Collects a spec from another library's settings: what was carried over, and what was left out and why.

Each library's module derives the values that depend on several settings; `carry` then moves all others by the table of
names (`paceline.spec.foreign`).
"""

from __future__ import annotations

import re
import reprlib
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from paceline.spec.foreign import EXAMPLES, ForeignName, key_for, look_up, table
from paceline.spec.keys import keys


@dataclass
class Conversion:
    library: str
    settings: dict[str, Any]
    """Maps the dotted name of each setting of the other library to its value."""
    algorithm: str = "grpo"
    tree: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """One line for each setting that was left out: name, value, reason."""
    notes: list[str] = field(default_factory=list)
    """Sentences about differences and about what to check by hand."""
    used: set[str] = field(default_factory=set)
    """Names of settings that were read or left out; `carry` skips them."""
    files: dict[str, str] = field(default_factory=dict)
    """Maps the name of each file to write beside the spec to its content."""

    def take(self, name: str, default: Any = None) -> Any:
        """Return a setting, or `default` if it is not set, and mark it as used."""
        self.used.add(name)
        value = self.settings.get(name)
        return default if value is None else value

    def take_below(self, prefix: str) -> dict[str, Any]:
        """Return the settings whose names begin with `prefix`, keyed by the rest of their names, and mark them as
        used."""
        return {name.removeprefix(prefix): self.take(name) for name in self.settings if name.startswith(prefix)}

    def skip(self, *prefixes: str) -> None:
        """Mark all settings whose names begin with one of `prefixes` as used."""
        self.used.update(name for name in self.settings if name.startswith(prefixes))

    def move(self, name: str, key: str) -> None:
        """Set a key of the spec to the value of a setting, if the setting has one."""
        if (value := self.take(name)) is not None:
            self.put(key, value)

    def put(self, key: str, value: Any) -> None:
        """Set a dotted key of the spec, in the algorithm's section if the key begins with `grpo` or `loss_fn`."""
        key = self.place(key)
        if key:
            set_at(self.tree, key, _home(value))

    def place(self, key: str) -> str:
        """Return the spec's key for the algorithm; empty if the algorithm has none."""
        return key_for(key, self.algorithm)

    def leave_out(self, name: str, reason: str) -> None:
        """Note that a setting was left out, unless it is not set or is switched off. An empty table of prime-rl is
        on."""
        value = self.settings.get(name)
        if value is not None:
            self.used.add(name)
            is_off = value is False or value == [] or (value == {} and self.library != "prime_rl")
            if not is_off:  # what is switched off has no effect in the other library either
                self.left_out.append(f"{name} ({reprlib.repr(value)}): {reason}")

    def carry(self) -> None:
        """Carry over every unused setting by the table of names."""
        for name, value in self.settings.items():
            if name not in self.used and value is not None:
                self._carry_one(name, plain(value))

    def skip_disabled(self) -> None:
        """Mark every setting below a section with `enabled: false` as used, because it has no effect. Exceptions are
        `colocated`, which has a list of GPUs, and `async_grpo`, whose settings are read in both states."""
        for name, value in self.settings.items():
            section, _, last = name.rpartition(".")
            if last == "enabled" and value is False and not section.endswith(("colocated", "async_grpo")):
                self.skip(f"{section}.")

    def close(self) -> None:
        """Leave out what a spec would refuse: evaluations without data, and letters that a name may not have."""
        if not self.tree.get("data", {}).get("validation"):
            section = self.tree.get(self.algorithm if self.algorithm in EXAMPLES else "grpo", {})
            for name in ("val_period", "val_at_start", "val_at_end"):
                if section.pop(name, None):
                    self.left_out.append(f"{name}: there is no validation set; set data.validation and {name}")
        if "name" in self.tree:
            self.tree["name"] = re.sub(r"[^A-Za-z0-9._-]+", "-", str(self.tree["name"])).strip("-._")[:63] or "run"

    def _carry_one(self, name: str, value: Any) -> None:
        if name in keys() and name not in table(self.library):
            if keys()[name].section is None and self.place(name):
                return self.put(name, value)
            return self.leave_out(name, f"algorithm {self.algorithm} does not read this key")
        entry = self._entry(name)
        if entry is None:
            return self.leave_out(name, "the name is unknown")
        if not entry.key:
            return self.leave_out(name, entry.none)
        if entry.rule or entry.place or entry.name.endswith(".*"):
            return self.leave_out(name, f"set {entry.key} by hand{'; ' if entry.note else ''}{entry.note}")
        if not self.place(entry.key):
            return self.leave_out(name, f"algorithm {self.algorithm} does not read {entry.key}")
        if entry.values is None:
            return self.put(entry.key, value)
        if isinstance(value, str | int | float | None) and value in entry.values:
            return self.put(entry.key, entry.values[value])
        return self.leave_out(name, f"{entry.key} has no such value")

    def _entry(self, name: str) -> ForeignName | None:
        """Return the entry for the name or the longest section above it, from this library's table, else from
        another's."""
        names = table(self.library)
        parts = name.split(".")
        sections = [f"{'.'.join(parts[:length])}.*" for length in range(len(parts), 0, -1)]
        return next((names[each] for each in (name, *sections) if each in names), None) or look_up(name)


MACHINERY = (
    "logger", "cluster", "checkpointing", "policy.generation", "policy.dtensor_cfg", "policy.megatron_cfg",
    "policy.sequence_packing", "policy.dynamic_batching", "trainer", "actor_rollout_ref.rollout", "actor_rollout_ref.ref",
    "actor_rollout_ref.actor.megatron", "actor_rollout_ref.actor.fsdp_config",
    "inference", "wandb", "ckpt", "deployment", "slurm", "log", "monitors", "ray_kwargs", "trainer.model", "report_to",
)  # fmt: skip
"""Sections that decide how a run is executed and recorded, not what it trains: names are enough."""
TRAINS = (
    "trainer.optim", "trainer.loss", "trainer.scheduler", "checkpointing.metric_name", "policy.megatron_cfg.optimizer",
    "policy.megatron_cfg.scheduler",
)  # fmt: skip
"""Names and sections within MACHINERY that decide what is trained."""
LINE = 170
"""Characters of the names in one line."""


def one_line_a_section(left_out: list[str]) -> list[str]:
    """Return the lines of `left_out`. At the end, settings of a section of MACHINERY share a line without reasons."""
    lines, sections = [], dict[str, list[str]]()
    for line in left_out:
        name = line.partition(": ")[0].partition(" ")[0]
        section = max((each for each in MACHINERY if name.startswith(f"{each}.")), key=len, default="")
        section = "" if f"{name}.".startswith(tuple(f"{each}." for each in TRAINS)) else section
        if section:
            sections.setdefault(section, []).append(name.removeprefix(f"{section}."))
        else:
            lines.append(line)
    for section, names in sections.items():
        lines += [f"{section}: {part}" for part in textwrap.wrap(", ".join(names), LINE)]
    return lines


def flattened(tree: Mapping[str, Any], library: str, above: str = "") -> dict[str, Any]:
    """Return the values of nested sections by dotted name. Lists, and mappings of a known name, are one value each;
    an empty section counts as nothing."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{above}{key}"
        is_value = not table(library).keys().isdisjoint((name, f"trainer.{name}"))
        is_value |= name in keys() and keys()[name].type_text.startswith("mapping")
        if isinstance(value, Mapping) and not is_value:
            found |= flattened(value, library, f"{name}.")
        else:
            found[name] = value
    return found


def set_at(tree: dict[str, Any], name: str, value: Any) -> None:
    """Set the value of a dotted name in nested sections."""
    *sections, last = name.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[last] = value


def plain(value: Any) -> Any:
    """Return a value as YAML 1.2 reads it: `1e-6` is a number."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        return float(value)
    return value


def scalar(text: str) -> Any:
    """Return a text as YAML reads it; the text itself if it is not YAML."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _home(value: Any) -> Any:
    if isinstance(value, list):
        return [_home(each) for each in value]
    if isinstance(value, dict):
        return {name: _home(each) for name, each in value.items()}
    if not isinstance(value, str):
        return value
    return re.sub(r"^(\$\{?PWD\}?|\$\(pwd\))(?=/|$)", ".", re.sub(r"^\$\{?HOME\}?(?=/|$)", "~", value))


def whole(total: float, parts: float) -> int:
    """Return total / parts as a count: rounded up, at least 1."""
    return max(1, -(-int(total) // max(1, int(parts))))


def rest_or(new: int, total: Any) -> int | str:
    """Return the limit of a completion: `rest` if the completion could fill the whole sequence, else `new`."""
    return "rest" if isinstance(total, int) and new >= total else new


def listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str | Mapping) else [value]

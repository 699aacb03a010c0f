"""The dictionary of other libraries' names, and its lookup by the name that a user typed. `trl.yaml`, `nemo_rl.yaml`,
`verl.yaml` and `prime_rl.yaml` have one entry for each name, at its path in the library, `common.yaml` has words of
several libraries, and `values.yaml` values by our key. A test checks every key in these files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from paceline.spec.keys import keys

Rule = Literal["", "computed", "by_hand"]
TABLES = ("nemo_rl", "trl", "verl", "prime_rl", "common")
"""Tables by precedence: NeMo RL first, because NeMo RL's sections are named like ours."""
MIN_SUFFIX = 5
"""Smallest number of characters in the last parts of a name (`rollout.n`) that identify the name."""


EXAMPLES = ("sft", "dpo", "kto", "orpo", "rm")
"""Algorithms that train on a data set's examples."""
SAME = "same"
"""Value in reference.yaml: the library's name equals our key; TRL's name, which has no sections, equals the key's last
part."""
RENAMED = {"num_prompts_per_step": "num_examples_per_step"}
"""Maps a key of `grpo` to the key's name in the sections of EXAMPLES, if that name is different."""


@dataclass(frozen=True)
class ForeignName:
    library: str
    """Library's display name, `NeMo RL`; empty for a common word."""
    name: str
    """Dotted name in the library; a name that ends with `.*` stands for every key below it."""
    key: str = ""
    """Our dotted key (`rewards.N.weight`); empty without a counterpart."""
    note: str = ""
    """Difference between the library's setting and ours, as a clause."""
    none: str = ""
    """Reason for the lack of a counterpart, as a clause after "because"."""
    place: str = ""
    """For a whole section: the section of our spec with the same keys, as a clause."""
    values: Mapping[Any, Any] | None = None
    """Maps the library's values to ours, if they differ."""
    rule: Rule = ""
    """Conversion by `paceline import`: unchanged, computed from several values, or by hand."""


@cache
def table(library: str) -> dict[str, ForeignName]:
    """Return the entries of a library's table by name; `library` is one of TABLES."""
    tree = _read(f"{library}.yaml")
    entries = {}
    for name, entry in tree["names"].items():
        fields = {"key": entry} if isinstance(entry, str) else entry
        entries[name] = ForeignName(tree["library"], name, **fields)
    return entries


@cache
def values() -> dict[str, dict[Any, Any]]:
    """Return, for each of our keys, other libraries' values with our value or a clause."""
    found: dict[str, dict[Any, Any]] = _read("values.yaml")
    return found


@cache
def shown_names() -> dict[str, dict[str, str]]:
    """Return, for each of our keys, the key's name in each library (NeMo RL or TRL) that has such a name."""
    tree: dict[str, list[str | None]] = _read("reference.yaml")
    return {
        key: {
            library: name if name != SAME else key if library == "NeMo RL" else key.rpartition(".")[2]
            for library, name in zip(("NeMo RL", "TRL"), found, strict=True)
            if name is not None
        }
        for key, found in tree.items()
    }


def key_for(key: str, algorithm: str) -> str:
    """Return our `key` (of `grpo` or `loss_fn`) in the section of an algorithm; empty if that section lacks the key."""
    section, _, name = key.partition(".")
    if algorithm in EXAMPLES and section == "grpo":
        key = f"{algorithm}.{RENAMED.get(name, name)}"
    elif algorithm in ("dpo", "kto") and key == "loss_fn.reference_policy_kl_penalty":
        key = f"{algorithm}.reference_policy_kl_penalty"
    elif algorithm in EXAMPLES and section in ("loss_fn", "async_grpo", "rewards", "value"):
        return ""
    return key if key in keys() else ""


def look_up(path: str) -> ForeignName | None:
    """Return the entry for the dotted name that was typed; None if no library has it. The search order is: the whole
    name; then the longest section above the name that has an entry with `.*`; then the name's last parts, because
    people write a name below the section in which they expect it (`grpo.num_iterations`)."""
    for library in TABLES:
        if path in table(library):
            return table(library)[path]
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        section = ".".join(parts[:length])
        for library in TABLES:
            for name in (f"{section}.*", section):
                entry = table(library).get(name)
                if entry and (name.endswith("*") or length == len(parts) or _is_mapping(entry.key)):
                    return entry
    return next((found for each in range(len(parts)) if (found := _by_suffix(".".join(parts[each:])))), None)


def _is_mapping(key: str) -> bool:
    return key in keys() and keys()[key].type_text.startswith("mapping")


def _by_suffix(suffix: str) -> ForeignName | None:
    """Return the unambiguous entry of one library that is `suffix`, or ends with it, and is not our own key."""
    for library in TABLES:
        if suffix in table(library):
            return table(library)[suffix]
    if len(suffix) < MIN_SUFFIX:
        return None
    last = suffix.rpartition(".")[2]
    if any(path.rpartition(".")[2] == last for path in keys()):
        return None
    entries = {
        entry.key or entry.none: entry
        for library in TABLES
        for name, entry in table(library).items()
        if name.endswith(f".{suffix}")
    }
    return next(iter(entries.values())) if len(entries) == 1 else None


def _read(name: str) -> Any:
    return yaml.safe_load((Path(__file__).parent / name).read_text(encoding="utf-8"))

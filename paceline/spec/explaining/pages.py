"""Pages of the documentation that are made from the spec's classes and from the dictionary of names."""

from __future__ import annotations

import textwrap

from paceline.spec.foreign.names import TABLES, ForeignName, shown_names, table
from paceline.spec.keys import Key, keys

COLUMNS = 120

CONFIGURATION = """\
# Configuration

Every key of a spec, with its type, its default and one sentence. `paceline spec --explain KEY` prints the same, and
`paceline spec FILE` checks a spec and prints it with all defaults. This page is generated from the classes in
`paceline/spec/` by `python -m paceline.services.cli.reference`.

A spec is a YAML file of sections. Each key can be overridden on the command line by its dotted name:
`paceline up spec.yaml grpo.max_num_steps=50 rewards.0.weight=0.5`. In the names below `N` is the index of a list item.

After a key stands its name in NeMo RL and in TRL, where there is one. Units may differ:
[foreign_names.md](foreign_names.md) says how, for more names and libraries.
"""
NAMES = """\
# Names of other libraries

The keys of a spec for the settings of TRL, NeMo RL, verl and prime-rl. An unknown key is answered from this list, and
`paceline import` uses it ([migration.md](migration.md)). This page is generated from `paceline/spec/foreign/` by
`python -m paceline.services.cli.reference`. `.*` stands for every key below.
"""


def configuration() -> str:
    """Return the page with every key of the spec."""
    sections = {path: key for path, key in keys().items() if key.section is not None}
    top = [key for path, key in keys().items() if "." not in path and key.section is None]
    parts = [CONFIGURATION, "## Top level", _items(top)]
    for path, section in sections.items():
        below = [key for name, key in keys().items() if _directly_below(name, path) and key.section is None]
        parts += [f"## {path}", _wrapped(section.description), _items(below)]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def foreign_names() -> str:
    """Return the page with every name of the dictionary, by library."""
    parts = [NAMES]
    for library in TABLES:
        entries = list(table(library).values())
        title = entries[0].library or "Words of many libraries"
        named = [_entry(entry) for entry in entries if entry.key]
        without = [_entry(entry) for entry in entries if not entry.key]
        parts += [f"## {title}", "\n".join(named), f"### {title}: no counterpart", "\n".join(without)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _directly_below(name: str, section: str) -> bool:
    rest = name.removeprefix(f"{section}.").removeprefix("N.")
    return name.startswith(f"{section}.") and "." not in rest


def _items(found: list[Key]) -> str:
    return "\n".join(_item(key) for key in found)


def _item(key: Key) -> str:
    default = "required" if key.default_text == "required" else f"default `{key.default_text}`"
    names = "".join(f" {library}: `{name}`." for library, name in shown_names().get(key.path, {}).items())
    return _wrapped(f"- `{key.path}` ({key.type_text}; {default}): {key.description}{names}", "  ")


def _entry(entry: ForeignName) -> str:
    if not entry.key:
        return _wrapped(f"- `{entry.name}`: {entry.none}", "  ")
    note = entry.note or entry.place
    return _wrapped(f"- `{entry.name}`: `{entry.key}`{'; ' if note else ''}{note}", "  ")


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )

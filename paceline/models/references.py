"""Names of registered models: `NAME`, `NAME:VERSION` and `NAME@ALIAS`."""

from __future__ import annotations

import re
from typing import NamedTuple

from paceline.errors import InvalidInput

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ALIAS = re.compile(r"[a-z][a-z0-9_-]{0,31}")
REFERENCE = re.compile(
    rf"(?P<name>{NAME.pattern})(?::(?P<version>[1-9]\d{{0,8}})|@(?P<alias>{ALIAS.pattern}))?"
)
CHAMPION = "champion"
"""Alias of the version that is in use, where nobody names another alias."""


class Reference(NamedTuple):
    """A model, with one of its versions or an alias, or neither."""

    name: str
    version: int = 0
    """0: the newest version."""
    alias: str = ""

    def __str__(self) -> str:
        return self.name + (f":{self.version}" if self.version else f"@{self.alias}" if self.alias else "")


def read_reference(text: str) -> Reference:
    """Return the model that a text names. Raises InvalidInput."""
    found = REFERENCE.fullmatch(text)
    if found is None:
        raise InvalidInput(
            f"{text[:80]!r} is no registered model; write NAME, NAME:VERSION or NAME@ALIAS, such as arithmetic@{CHAMPION}. "
            "Names have up to 64 letters, digits, dots, hyphens and underscores"
        )
    return Reference(found["name"], int(found["version"] or 0), found["alias"] or "")


def check_name(name: str) -> None:
    """Raise InvalidInput for a text that cannot be the name of a model."""
    if not NAME.fullmatch(name):
        raise InvalidInput(
            f"the model's name is {name[:80]!r}; it has to be 1 to 64 letters, digits, dots, hyphens and underscores, the first "
            "a letter or digit"
        )


def check_alias(alias: str) -> None:
    """Raise InvalidInput for a text that cannot be an alias."""
    if not ALIAS.fullmatch(alias):
        raise InvalidInput(
            f"the alias is {alias[:80]!r}; it has to be 1 to 32 lower-case letters, digits, hyphens and underscores, the first a "
            f"letter, such as {CHAMPION!r}"
        )

"""Fills texts that have names of columns in braces. Pure. Promise: an inserted value is never read as a template again,
so a value that holds `{answer}` stays unchanged."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


def placeholders(template: str) -> set[str]:
    """Return the names in braces: `prompt` for `{prompt}`. Other braces are text."""
    return set(PLACEHOLDER.findall(template))


def fill(template: str, values: Mapping[str, Any], write: Callable[[Any], str] = str) -> str:
    """Return the template with each name replaced by its value, formatted by `write`; names without a value stay."""

    def value_of(match: re.Match[str]) -> str:
        name = match[1]
        return write(values[name]) if name in values else match[0]

    return PLACEHOLDER.sub(value_of, template)


def as_lines(value: Any) -> str:
    """Return text unchanged, and a list with each entry on its own line."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

"""YAML of a stranger, read within bounds: size, depth, number of values, length of one, no anchors, no aliases.

An alias stands for a whole tree, and aliases of aliases for exponentially many: a spec has no use for them on its way (a
user's own file may have them: they are resolved where it is read). The loader is the plain Python one, so that a thread
which reads a large text leaves other threads their turn.
"""

from __future__ import annotations

from typing import Any

import yaml

from paceline.errors import SpecError

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 20_000
"""Keys and values together."""
MAX_SCALAR = 1 << 16
"""Characters of one value."""


class BoundedLoader(yaml.SafeLoader):
    """Raises SpecError at what is beyond the bounds, before it is built."""

    def __init__(self, text: str):
        super().__init__(text)
        self._depth = self._nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Counts on the way down."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        place = f"line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise SpecError(
                f"the spec has a YAML anchor or alias in {place}; write the values out (`paceline submit` does)"
            )
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise SpecError(f"the spec has more than {MAX_NODES} keys and values (in {place})")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_SCALAR:
            raise SpecError(
                f"the value in {place} has {len(event.value)} characters, {MAX_SCALAR} are allowed"
            )
        if self._depth == MAX_DEPTH:
            raise SpecError(f"the spec is nested more than {MAX_DEPTH} levels deep (in {place})")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def load(text: str) -> Any:
    """What the YAML `text` says. Raises SpecError: not YAML, or beyond the bounds."""
    size = len(text.encode("utf-8", "replace"))
    if size > MAX_BYTES:
        raise SpecError(f"the spec has {size} bytes, {MAX_BYTES} are allowed; keep data in files")
    loader = None
    try:
        loader = BoundedLoader(text)
        return loader.get_single_data()
    except yaml.YAMLError as error:
        raise SpecError(f"the spec is not valid YAML: {error}") from None
    except (ValueError, OverflowError) as error:  # a number or a date that Python cannot hold
        raise SpecError(f"the spec has a value that cannot be read: {error}") from None
    finally:
        if loader is not None:
            loader.dispose()

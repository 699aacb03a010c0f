"""Parses untrusted YAML with limits on size, depth, number and length of values, and time. Anchors and aliases are
refused: nested aliases can repeat a tree exponentially many times, and a submitted spec needs no aliases, because
reading a user's file resolves them. libyaml reads the characters and Python builds the values, so a thread that
reads a large text lets other threads run after each value."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import Resolver
from yaml.scanner import Scanner

from paceline.errors import SpecError

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 20_000
"""Largest number of keys and values in a spec, counted together."""
MAX_SCALAR = 1 << 16
"""Largest number of characters in one value."""
MAX_NUMBER = 1000
"""Largest number of characters in a number: the time to read some YAML notations is quadratic in their length."""
MAX_READ_S = 10.0
"""Largest number of seconds to read one text, which takes tenths of a second unless the machine is busy."""


class PythonEvents(Reader, Scanner, Parser):
    """Replaces `CParser` if PyYAML was built without libyaml."""

    def __init__(self, text: str):
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)


def events_class() -> Any:
    try:
        return importlib.import_module("yaml.cyaml").CParser
    except ImportError:
        return PythonEvents


Events: Any = events_class()


NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class StepwiseLoader(Composer, Events, SafeConstructor, Resolver):  # type: ignore[misc]
    """PyYAML's safe loader, with a Python step for each value. Raises SpecError for a mapping with a key twice."""

    def __init__(self, text: str):
        Events.__init__(self, text)
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        """Read `1:30` and `010` as texts; YAML 1.1 reads them as 90 and 8."""
        tag: Any = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        is_odd = tag in NUMBERS and (":" in value or re.fullmatch(r"[-+]?0[0-9_]+", value))
        return "tag:yaml.org,2002:str" if is_odd else tag

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Compare the keys of a mapping as written, before `<<` adds the keys of other mappings."""
        node: Any = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line, name = key.start_mark.line + 1, (key.tag, key.value)
            if name in lines:
                raise SpecError(
                    f"{key.value[:80]!r} is in line {lines[name]} and again in line {line}; write each key once, with all "
                    "its values"
                )
            lines[name] = line
        return node


class BoundedLoader(StepwiseLoader):
    """Loader that raises SpecError for a value beyond the limits, before it is built."""

    def __init__(self, text: str, clock: Callable[[], float]):
        super().__init__(text)
        self._depth = self._nodes = 0
        self._clock, self._until_s = clock, clock() + MAX_READ_S

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Count levels and values of a text before they are built. Raises SpecError beyond a limit."""
        event: Any = self.peek_event()
        place = f"line {event.start_mark.line + 1}"
        self._check_time(place)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise SpecError(
                f"the spec has a YAML anchor or alias in {place}; write the values out, or submit it with `paceline submit`, which writes them out"
            )
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise SpecError(f"the spec has more than {MAX_NODES} keys and values (in {place})")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_SCALAR:
            raise SpecError(f"the value in {place} has {len(event.value)} characters; at most {MAX_SCALAR} are allowed")
        if self._depth == MAX_DEPTH:
            raise SpecError(f"the spec is nested more than {MAX_DEPTH} levels deep (in {place})")
        self._depth += 1
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        is_number = isinstance(node, yaml.ScalarNode) and node.tag.endswith((":int", ":float"))
        if is_number and len(node.value) > MAX_NUMBER:
            raise SpecError(
                f"the number in {place} has {len(node.value)} characters and cannot be read; at most {MAX_NUMBER} are allowed"
            )
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Check the time limit before each value. Raises SpecError."""
        self._check_time(f"line {node.start_mark.line + 1}")
        return super().construct_object(node, deep)

    def _check_time(self, place: str) -> None:
        if self._clock() > self._until_s:
            raise SpecError(
                f"reading the spec took longer than {MAX_READ_S:g} s and only reached {place}; shorten the spec, or "
                "submit it again when the coordinator's machine has less to do"
            )


def excess(value: Any) -> str:
    """Return which limit of levels, keys or values a parsed value exceeds, aliases as whole trees; empty if none."""
    waiting, nodes = [(value, 1)], 0
    while waiting:
        each, depth = waiting.pop()
        nodes += 1
        if nodes > MAX_NODES:
            return f"has more than {MAX_NODES} keys and values, with its aliases written out"
        if depth > MAX_DEPTH:
            return f"is nested more than {MAX_DEPTH} levels deep"
        parts = [*each, *each.values()] if isinstance(each, dict) else each
        if isinstance(parts, list | tuple | set):
            waiting += [(part, depth + 1) for part in parts]
    return ""


def load(text: str, clock: Callable[[], float] = time.monotonic) -> Any:
    """Return the contents of the YAML `text`. Raises SpecError if `text` is not YAML or exceeds a limit."""
    size = len(text.encode("utf-8", "replace"))
    if size > MAX_BYTES:
        raise SpecError(f"the spec has {size} bytes; at most {MAX_BYTES} are allowed, so keep data in files")
    loader = None
    try:
        loader = BoundedLoader(text, clock)
        return loader.get_single_data()
    except yaml.YAMLError as error:
        raise SpecError(f"the spec is not valid YAML: {error}") from None
    except (ValueError, OverflowError) as error:  # a number or a date that Python cannot represent
        raise SpecError(f"the spec has a value that cannot be read: {error}") from None
    finally:
        if loader is not None:
            loader.dispose()

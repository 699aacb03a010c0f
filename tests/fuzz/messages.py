"""Messages that nobody honest sends, built from the protobuf descriptors: every field, extreme values, unknown enums, torn bytes.

A seed gives the same messages. Fields whose names are in `known` often get values that the receiver knows (a run, a member,
a term), so that a message comes further than its first check.
"""

from __future__ import annotations

import random
import string
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor

MAX_DEPTH = 5
KNOWN_SHARE = 0.7
"""Probability that a field gets a value that the receiver knows, where there is one."""

TORN_SHARE = 0.15
"""Probability that the bytes of a message are torn, flipped or grown afterwards."""

EMPTY_SHARE = 0.03
"""Probability that a message has no field."""

LONG_SHARE = 0.01
"""Probability that a text is long or a list has many elements."""

INTEGERS = (0, 1, 2, 3, 7, 128, 4096, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
DOUBLES = (0.0, 1.0, 0.5, -1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"), 3.4e38)
TEXTS = (
    "", "x", "\n", "a\nERROR forged", "\x00", "../../x", "/etc/passwd", "file:///etc/passwd", "http://localhost/x",
    "{}", "[]", "null", '{"a": [1, {"b": null}]}', "[" * 2000, "ü" * 50, "\U0001f9ea", "%s%n", "'; DROP TABLE runs; --",
    "checkpoints", "127.0.0.1:1", "tcp://0.0.0.0:1", "gloo", "nccl", "stop", "NaN",
)  # fmt: skip

Known = Mapping[str, Sequence[Any]]


class Maker:
    """Makes messages; one for each source of them, as it is not for several threads."""

    def __init__(self, seed: int | str, known: Known):
        self.random = random.Random(seed)
        self.known: dict[str, Sequence[Any]] = dict(known)

    def bytes_of(self, kind: Descriptor) -> bytes:
        """A message of the kind on the wire, sometimes damaged."""
        return self.damaged(self.message(kind).SerializeToString())

    def message(self, kind: Descriptor, depth: int = 0) -> Any:
        """A message of the kind."""
        made = message_factory.GetMessageClass(kind)()
        if self.random.random() < EMPTY_SHARE:
            return made
        chosen = {self.random.choice(group.fields).name for group in kind.oneofs}
        for field in kind.fields:
            if field.containing_oneof is not None and field.name not in chosen:
                continue
            if self.random.random() < 0.15:
                continue  # left out
            self._fill(made, field, depth)
        return made

    def damaged(self, content: bytes) -> bytes:
        """The bytes as they are, or with a few of them changed, missing or added."""
        if self.random.random() >= TORN_SHARE:
            return content
        torn = bytearray(content)
        match self.random.randrange(4):
            case 0:
                del torn[self.random.randrange(len(torn) + 1) :]
            case 1:
                torn += self.random.randbytes(self.random.randrange(1, 40))
            case 2:
                for _ in range(self.random.randrange(1, 5)):
                    if torn:
                        torn[self.random.randrange(len(torn))] ^= 1 << self.random.randrange(8)
            case _:
                torn = bytearray(self.random.randbytes(self.random.randrange(200)))
        return bytes(torn)

    def text(self) -> str:
        """Any text."""
        if self.random.random() < LONG_SHARE:
            return self.random.choice(string.printable) * self.random.choice((5_000, 70_000, 300_000))
        return self.random.choice(TEXTS)

    def json(self, depth: int = 0) -> Any:
        """Any JSON value."""
        kinds = ["text", "number", "none", "flag"] + (["list", "object"] if depth < 4 else [])
        match self.random.choice(kinds):
            case "text":
                return self.text()
            case "number":
                return self.random.choice([*INTEGERS, -1, 0.5, 1e300])
            case "none":
                return None
            case "flag":
                return self.random.random() < 0.5
            case "list":
                return [self.json(depth + 1) for _ in range(self.random.randrange(4))]
            case _:
                return {self.text()[:50]: self.json(depth + 1) for _ in range(self.random.randrange(4))}

    def _fill(self, made: Any, field: FieldDescriptor, depth: int) -> None:
        if field.is_repeated:
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                self._fill_map(getattr(made, field.name), field)
                return
            values = getattr(made, field.name)
            for _ in range(self._number()):
                if field.message_type is not None:
                    if depth < MAX_DEPTH:
                        values.add().CopyFrom(self.message(field.message_type, depth + 1))
                else:
                    values.append(self._value(field))
        elif field.message_type is not None:
            if depth < MAX_DEPTH:
                getattr(made, field.name).CopyFrom(self.message(field.message_type, depth + 1))
        else:
            setattr(made, field.name, self._value(field))

    def _fill_map(self, entries: Any, field: FieldDescriptor) -> None:
        key, value = field.message_type.fields
        for _ in range(self._number()):
            entries[self._value(key)] = self._value(value)

    def _number(self) -> int:
        return 3000 if self.random.random() < LONG_SHARE else self.random.choice((0, 1, 1, 2, 3, 5))

    def _value(self, field: FieldDescriptor) -> Any:
        known = [value for value in self.known.get(field.name, ()) if isinstance(value, _python_types(field))]
        if known and self.random.random() < KNOWN_SHARE:
            return self.random.choice(known)
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_STRING:
                if field.type == FieldDescriptor.TYPE_BYTES:
                    return self.random.randbytes(self.random.randrange(64))
                return self.text()
            case FieldDescriptor.CPPTYPE_BOOL:
                return self.random.random() < 0.5
            case FieldDescriptor.CPPTYPE_DOUBLE:
                return self.random.choice(DOUBLES)
            case FieldDescriptor.CPPTYPE_FLOAT:
                return self.random.choice(DOUBLES[:4] + DOUBLES[6:9])
            case FieldDescriptor.CPPTYPE_ENUM:
                return self.random.choice([*(value.number for value in field.enum_type.values), 7, 99, -1])
            case FieldDescriptor.CPPTYPE_UINT32:
                return self.random.choice(INTEGERS) % 2**32
            case FieldDescriptor.CPPTYPE_INT32:
                return self.random.choice((0, 1, -1, 7, 2**31 - 1, -(2**31)))
            case FieldDescriptor.CPPTYPE_INT64:
                return self.random.choice((0, 1, -1, 2**40, 2**63 - 1, -(2**63)))
            case _:
                return self.random.choice(INTEGERS)


def _python_types(field: FieldDescriptor) -> tuple[type, ...]:
    """Return the types of values that a field takes: fields of one name may have several."""
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return (bytes,) if field.type == FieldDescriptor.TYPE_BYTES else (str,)
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return (int, float)
        case FieldDescriptor.CPPTYPE_BOOL:
            return (bool,)
        case _:
            return (int,)

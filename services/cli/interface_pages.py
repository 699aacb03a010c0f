"""The pages of the interfaces for programs: docs/protos.md from the .proto files, docs/client.md from the docstrings.

Every rpc, message, field and value stands in the first, every public method of the client in the second, so that neither
can lack what exists.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, ServiceDescriptor

from paceline import v1

FOLDER = Path(v1.__path__[0])
PROTOS_PAGE = """\
# gRPC interface

Every service, call, message and field of `protos/paceline/v1`, with the comment of its file. Made by
`python -m paceline.services.cli.reference`. Every server has reflection and `grpc.health.v1`. [python.md](python.md)
has calls with `grpcurl`, [dashboard.md](dashboard.md#rest) the same calls with `curl`.
"""
CLIENT_PAGE = """\
# Python client

Every public name of `paceline`, its client and its errors, with the docstrings. Made by
`python -m paceline.services.cli.reference`. [python.md](python.md) introduces them.
"""
PYTHON_PARTS = (
    ("One call", "paceline.services.local.one_call", ("train", "TrainedRun")),
    ("Client", "paceline.client", ("Client", "Event", "RunState")),
    ("Records", "paceline.records", ("Records", "Verified", "RecordedEvent")),
    ("Registered models", "paceline.models.registered", ("Models",)),
    ("Services of one host", "paceline.services.local.cluster", ("LocalCluster",)),
)
COLUMNS = 120
SIGNATURE_WIDTH = 100
_OPENING = re.compile(r"\s*(?:message|service|enum)\s+(\w+)\s*\{")
_MEMBER = re.compile(r"\s*(?:rpc\s+(\w+)|(?:optional\s+|repeated\s+)?(?:[\w.<>, ]+?\s+)?(\w+)\s*=\s*\d+)")


def protos() -> str:
    """Return the page of the gRPC interface."""
    parts = [PROTOS_PAGE]
    for path in sorted(FOLDER.glob("*.proto")):
        descriptor = importlib.import_module(f"paceline.v1.{path.stem}_pb2").DESCRIPTOR
        comments = comments_of(path)
        parts.append(f"## {path.name}")
        parts += [_service(each, comments) for each in descriptor.services_by_name.values()]
        parts += [_message(each, comments) for each in _messages(descriptor.message_types_by_name.values())]
        parts += [_enum(each, comments) for each in descriptor.enum_types_by_name.values()]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def client() -> str:
    """Return the page of the Python client."""
    parts = [CLIENT_PAGE]
    for title, module, names in PYTHON_PARTS:
        parts.append(f"## {title}")
        for name in names:
            parts += _object(name, getattr(importlib.import_module(module), name))
    errors = importlib.import_module("paceline.errors")
    parts.append("## Errors\n\nAll of them are a `PacelineError` of `paceline.errors`.")
    found = [
        each for each in vars(errors).values() if inspect.isclass(each) and each.__module__ == errors.__name__
    ]
    rows = [
        f"| `{each.__name__}` | `{each.__mro__[1].__name__}` | {_cell(inspect.getdoc(each))} |"
        for each in found
    ]
    parts.append("| error | is a | meaning |\n|---|---|---|\n" + "\n".join(rows))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def comments_of(path: Path) -> dict[str, str]:
    """Return the comment before each message, rpc, field and value, by `Owner` and `Owner.member`."""
    found: dict[str, str] = {}
    owners, lines = list[str](), list[str]()
    for line in path.read_text(encoding="utf-8").splitlines():
        stripped = line.strip()
        if stripped.startswith("//"):
            lines.append(stripped.removeprefix("//").strip())
            continue
        if opening := _OPENING.match(line):
            owners.append(opening[1])
            found[opening[1]] = " ".join(lines)
            if stripped.endswith("}"):
                owners.pop()
        elif owners and (member := _MEMBER.match(line)):
            found[f"{owners[-1]}.{member[1] or member[2]}"] = " ".join(lines)
            if stripped.endswith("{"):
                owners.append(owners[-1])
        elif stripped.endswith("{"):  # oneof, or the options of an rpc
            owners.append(owners[-1] if owners else "")
        elif stripped.startswith("}") and owners:
            owners.pop()
        lines = []
    return found


def _messages(found: Any) -> Iterator[Descriptor]:
    for message in found:
        if not message.GetOptions().map_entry:
            yield message
            yield from _messages(message.nested_types)


def _service(service: ServiceDescriptor, comments: dict[str, str]) -> str:
    rows = [
        f"| `{method.name}` | {_streamed(method.client_streaming)}`{method.input_type.name}` | "
        f"{_streamed(method.server_streaming)}`{method.output_type.name}` | "
        f"{_cell(comments.get(f'{service.name}.{method.name}'))} |"
        for method in service.methods
    ]
    return (
        f"### {service.name}\n\n{_prose(comments.get(service.name, ''))}\n\n| call | request | response | meaning |\n|---|---|---|---|\n"
        + "\n".join(rows)
    )


def _streamed(streams: bool) -> str:
    return "stream of " if streams else ""


def _message(message: Descriptor, comments: dict[str, str]) -> str:
    head = f"### {message.name}\n\n{_prose(comments.get(message.name, ''))}"
    if not message.fields:
        return head
    rows = [
        f"| `{field.name}` | {field.number} | {_type(field)} | {_cell(comments.get(f'{message.name}.{field.name}'))} |"
        for field in message.fields
    ]
    return f"{head}\n\n| field | number | type | meaning |\n|---|---|---|---|\n" + "\n".join(rows)


def _enum(enum: EnumDescriptor, comments: dict[str, str]) -> str:
    rows = [
        f"| `{value.name}` | {value.number} | {_cell(comments.get(f'{enum.name}.{value.name}'))} |"
        for value in enum.values
    ]
    return (
        f"### {enum.name}\n\n{_prose(comments.get(enum.name, ''))}\n\n| value | number | meaning |\n|---|---|---|\n"
        + "\n".join(rows)
    )


def _type(field: FieldDescriptor) -> str:
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        key, value = message.fields_by_name["key"], message.fields_by_name["value"]
        return f"map of {_type(key)} to {_type(value)}"
    name = message.name if message else field.enum_type.name if field.enum_type else _scalar(field)
    if field.is_repeated:
        return f"repeated `{name}`"
    return f"optional `{name}`" if field.has_presence and message is None else f"`{name}`"


def _scalar(field: FieldDescriptor) -> str:
    """Return the type's word in a .proto file: `TYPE_UINT64` is `uint64`."""
    names = {
        number: name
        for name, number in vars(FieldDescriptor).items()
        if name.startswith("TYPE_") and isinstance(number, int)
    }
    return names[field.type].removeprefix("TYPE_").lower()


def _object(name: str, found: Any) -> list[str]:
    """Return the entry of a function or class, and one for each public method."""
    if not inspect.isclass(found):
        return [f"### {name}", _signature(name, found), _text(found)]
    parts = [f"### {name}"]
    if "__init__" in vars(found) and found.__init__.__doc__ and "__match_args__" not in vars(found):
        parts += [_signature(name, found), _text(found), _text(found.__init__)]
    else:
        parts.append(_text(found))
    for method, value in _members(found):
        if isinstance(value, property):
            parts += [f"#### {name}.{method}", _text(value.fget)]
        elif inspect.isfunction(value) or isinstance(value, classmethod):
            function = value.__func__ if isinstance(value, classmethod) else value
            parts += [f"#### {name}.{method}", _signature(method, function), _text(function)]
    return [part for part in parts if part]


def _members(found: type) -> Iterator[tuple[str, Any]]:
    """Yield the public members of a class and of its bases in the same package, the class's own first."""
    package = found.__module__.partition(".")[0]
    for each in found.__mro__:
        if each.__module__.partition(".")[0] == package:
            yield from ((name, value) for name, value in vars(each).items() if not name.startswith("_"))


def _signature(name: str, function: Any) -> str:
    """Return a block with the signature, a parameter a line where it is long."""
    parameters, star_written = list[str](), False
    signature = inspect.signature(function)
    for each in signature.parameters.values():
        if each.name in ("self", "cls"):
            continue
        if each.kind is each.KEYWORD_ONLY and not star_written:
            parameters.append("*")
        star_written = star_written or each.kind in (each.VAR_POSITIONAL, each.KEYWORD_ONLY)
        star = "*" if each.kind is each.VAR_POSITIONAL else "**" if each.kind is each.VAR_KEYWORD else ""
        parameters.append(f"{star}{each.name}{_annotation(each.annotation, ': ')}{_default(each)}")
    result = _annotation(signature.return_annotation, " -> ")
    line = f"{name}({', '.join(parameters)}){result}"
    if len(line) > SIGNATURE_WIDTH:
        line = f"{name}(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + f"){result}"
    return f"```text\n{line}\n```"


def _annotation(annotation: Any, before: str) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return before + (annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return ""
    function = callable(parameter.default)  # its representation has an address
    return f" = {getattr(parameter.default, '__qualname__', '…') if function else repr(parameter.default)}"


def _text(found: Any) -> str:
    """Return a docstring as paragraphs, with its examples as blocks."""
    paragraphs = []
    for paragraph in (inspect.getdoc(found) or "").split("\n\n"):
        indented = paragraph and all(line.startswith("    ") or not line for line in paragraph.splitlines())
        paragraphs.append(f"```text\n{inspect.cleandoc(paragraph)}\n```" if indented else _prose(paragraph))
    return "\n\n".join(paragraphs)


def _prose(text: str) -> str:
    return textwrap.fill(text, COLUMNS, break_long_words=False, break_on_hyphens=False)


def _cell(text: str | None) -> str:
    """Return text for one cell of a table."""
    return " ".join((text or "").split()).replace("|", "\\|")

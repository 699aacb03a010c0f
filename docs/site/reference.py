"""Makes the pages of the site's reference from what they describe: keys, commands, calls, metrics and foreign names.

docs/site/build.py writes them into its copy of the pages (docs/reference/); git has none of them. `pages()` returns their texts.
"""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Iterator
from typing import Any

import click
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, ServiceDescriptor

from paceline.apps.dashboard.backends import PROTOS, comments_of
from paceline.apps.tracking.names import NAMES as METRIC_NAMES
from paceline.apps.tracking.names import PREFIXES
from paceline.services.cli.main import main as paceline
from paceline.services.common.reporting.metric_table import PARTS, STATE
from paceline.spec.foreign import TABLES, ForeignName, shown_names, table
from paceline.spec.keys import Key, keys
from paceline.spec.sections.vllm import ALLOWED, REFUSED

WIDTH, COLUMNS = 110, 120
COMMANDS = """\
# Commands

The help of every command, as `paceline COMMAND --help` prints it.
"""
CONFIGURATION = """\
# Configuration

Every key of a spec, with its type, its default and one sentence. `paceline spec --explain KEY` prints the same;
`paceline spec FILE` checks a spec and prints it with all defaults.

A spec is a YAML file of sections. Override a key on the command line by its dotted name: `paceline up spec.yaml
grpo.max_num_steps=50 rewards.0.weight=0.5`. In the names below `N` is the index of a list item.

After a key stands its name in NeMo RL and in TRL, where there is one. Units may differ:
[foreign_names.md](foreign_names.md) says how, for more names and libraries.
"""
NAMES = """\
# Names of other libraries

The keys of a spec for the settings of TRL, NeMo RL, verl and prime-rl. An unknown key is answered from this list, and
`paceline import` uses it ([migration.md](../use/migration.md)). `.*` stands for every key below.
"""
PROTOS_PAGE = """\
# gRPC interface

Every service, call, message and field of `protos/paceline/v1`, with the comment of its file. Every server has
reflection and `grpc.health.v1`. [python.md](../use/python.md) has calls with `grpcurl`,
[dashboard.md](../use/dashboard.md#rest) the same calls with `curl`.
"""
CLIENT_PAGE = """\
# Python client

Every public name of `paceline`, its client and its errors. [python.md](../use/python.md) introduces them.
"""
METRICS = """\
# Table of metrics

Every metric of a run; `paceline metrics --explain NAME` prints the same. [metrics.md](../use/metrics.md) says where
they are recorded. *Healthy* says what to expect, and what another value means. A parameter of a name is in angle
brackets.
"""
TRACKER_NAMES = """\
# Names of metrics in trackers

The names that `names: trl` and `names: nemo_rl` give to metrics in [trackers](../use/trackers.md). Metrics that are
not in the table keep their names. A remark says what the other library measures instead.
"""
VLLM_ARGUMENTS = """\
# Engine arguments of vLLM

What `policy.generation.vllm_kwargs` may have. An argument is allowed if log-probabilities and versions were exact with
it in a test (`tests/rollout/vllm/test_speculation.py`), and refused otherwise. The list covers every argument of vLLM
0.32. [vllm.md](../use/vllm.md) describes the engine.
"""
PYTHON_PARTS = {
    "One call": ("services.local.one_call.train", "services.local.one_call.TrainedRun"),
    "Client": ("client.Client", "client.Event", "client.RunState"),
    "Records": ("records.Records", "records.Verified", "records.RecordedEvent"),
    "Registered models": ("models.registered.Models",),
    "Services of one host": ("services.local.cluster.LocalCluster",),
    "Errors": ("errors",),
}


def pages() -> dict[str, str]:
    """Return the text of each page by its name."""
    return {
        "configuration.md": configuration(),
        "foreign_names.md": foreign_names(),
        "commands.md": commands(),
        "protos.md": protos(),
        "client.md": client(),
        "metrics.md": metrics(),
        "tracker_names.md": tracker_names(),
        "vllm_arguments.md": vllm_arguments(),
    }


def commands() -> str:
    parts = [COMMANDS]
    for name, command in _commands(paceline, "paceline"):
        context = click.Context(command, info_name=name, max_content_width=WIDTH, terminal_width=WIDTH)
        lines = [line.rstrip() for line in command.get_help(context).splitlines()]
        parts.append(f"## {name}\n\n```\n" + "\n".join(lines) + "\n```")
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _commands(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yield each command below `group` with its whole name."""
    context = click.Context(group, info_name=name)
    for each in group.list_commands(context):
        command = group.get_command(context, each)
        assert command is not None, each
        whole = f"{name} {each}"
        if isinstance(command, click.Group):
            yield from _commands(command, whole)
        else:
            yield whole, command


def client() -> str:
    """Return a page of names, whose docstrings mkdocstrings puts in."""
    parts = [
        f"## {title}\n\n" + "\n\n".join(f"::: paceline.{name}" for name in names)
        for title, names in PYTHON_PARTS.items()
    ]
    return "\n".join([CLIENT_PAGE, *(f"{part}\n" for part in parts)])


def metrics() -> str:
    lines = [METRICS]
    for part in PARTS:
        kind = "Named `paceline.coordinator.<metric>`." if part is STATE else f"`kind` is `{part.kind}`."
        lines += [f"## {part.title}", "", _prose(f"{kind} {part.remark}"), ""]
        lines += ["| metric | unit | meaning | healthy |", "|---|---|---|---|"]
        lines += [f"| `{m.name}` | {m.unit} | {m.meaning} | {m.healthy} |" for m in part.metrics]
        lines.append("")
    return "\n".join(lines)


def tracker_names() -> str:
    lines = [
        TRACKER_NAMES,
        "| Paceline | TRL (`names: trl`) | NeMo RL (`names: nemo_rl`) | remark |",
        "|---|---|---|---|",
    ]
    for each in METRIC_NAMES:
        cells = [f"{PREFIXES[each.kind]}/{each.ours}", each.trl, each.nemo_rl]
        lines.append("| " + " | ".join([*(f"`{cell}`" if cell else "" for cell in cells), each.remark]) + " |")
    return "\n".join(lines) + "\n"


def vllm_arguments() -> str:
    lines = [VLLM_ARGUMENTS, "## Allowed", "", "| argument | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in ALLOWED.items()]
    lines += ["", "## Refused", "", "| argument | remedy |", "|---|---|"]
    lines += [f"| `{name}` | {remedy} |" for name, remedy in sorted(REFUSED.items())]
    return "\n".join(lines) + "\n"


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
    return textwrap.fill(text, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def protos() -> str:
    parts = [PROTOS_PAGE]
    for path in sorted(PROTOS.glob("*.proto")):
        descriptor = importlib.import_module(f"paceline.v1.{path.stem}_pb2").DESCRIPTOR
        comments = comments_of(path)
        parts.append(f"## {path.name}")
        parts += [_service(each, comments) for each in descriptor.services_by_name.values()]
        parts += [_message(each, comments) for each in _messages(descriptor.message_types_by_name.values())]
        parts += [_enum(each, comments) for each in descriptor.enum_types_by_name.values()]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


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
    return _table(service.name, comments, "call | request | response | meaning", rows)


def _streamed(streams: bool) -> str:
    return "stream of " if streams else ""


def _message(message: Descriptor, comments: dict[str, str]) -> str:
    rows = [
        f"| `{field.name}` | {field.number} | {_type(field)} | {_cell(comments.get(f'{message.name}.{field.name}'))} |"
        for field in message.fields
    ]
    return _table(message.name, comments, "field | number | type | meaning", rows)


def _enum(enum: EnumDescriptor, comments: dict[str, str]) -> str:
    rows = [
        f"| `{value.name}` | {value.number} | {_cell(comments.get(f'{enum.name}.{value.name}'))} |"
        for value in enum.values
    ]
    return _table(enum.name, comments, "value | number | meaning", rows)


def _table(name: str, comments: dict[str, str], columns: str, rows: list[str]) -> str:
    """Return the entry of a name, with its comment and, if it has any, its rows."""
    head = f"### {name}\n\n{_prose(comments.get(name, ''))}"
    ruler = "|---" * (columns.count("|") + 1)
    return f"{head}\n\n| {columns} |\n{ruler}|\n" + "\n".join(rows) if rows else head


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


def _prose(text: str) -> str:
    return textwrap.fill(text, COLUMNS, break_long_words=False, break_on_hyphens=False)


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")

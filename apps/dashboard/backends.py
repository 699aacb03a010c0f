"""Answers the dashboard's calls from a coordinator or a ledger (`paceline.services.local.ledger_calls`).

The HTTP paths and their OpenAPI document come from the services' descriptors and the protos' comments.
`POST /paceline.v1.RunService/List` is Connect's unary protocol, so Connect's clients work. Calls that take a stream,
and calls for proofs and tickets, have no path.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import MethodOptions

from paceline.calls.proof import AioProver
from paceline.calls.token import known_token
from paceline.services.common.serving.grpc_server import CHANNEL_OPTIONS
from paceline.tls.channels import RenewedChannel, open_aio_channel
from paceline.v1 import access_pb2, bundle_pb2, records_pb2, registry_pb2, run_pb2, status_pb2, worker_pb2

if TYPE_CHECKING:
    from paceline.services.local.ledger_calls import LedgerCalls
from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from paceline import __version__, v1
from paceline.v1 import common_pb2

PROTOS = Path(v1.__path__[0])
_OPENING = re.compile(r"\s*(?:message|service|enum)\s+(\w+)\s*\{")
_MEMBER = re.compile(r"\s*(?:rpc\s+(\w+)|(?:optional\s+|repeated\s+)?(?:[\w.<>, ]+?\s+)?(\w+)\s*=\s*\d+)")
CALL_S, LONG_CALL_S = 60.0, 3600.0
MAX_TOKENS = 256
"""Largest number of callers whose sessions with the coordinator are kept; any other caller begins a new session."""
OF_CALLERS = ("paceline.v1.AccessService/Prove", "paceline.v1.AccessService/IssueTicket")
"""Calls that concern the caller's own token. From the dashboard, they would give the rights of the dashboard's
token."""
LONG_CALLS = ("paceline.v1.RecordsService/VerifyRun", "paceline.v1.RunService/Submit")


class CoordinatorBackend:
    """A coordinator, which may restart meanwhile. Methods raise PacelineError or grpc.aio.AioRpcError; without a
    caller's `token`, calls use the dashboard's."""

    def __init__(self, address: str, token_file: Path):
        self._channel = RenewedChannel(lambda: open_aio_channel(address, CHANNEL_OPTIONS))
        self._address, self._token_file = address, token_file
        self._provers: OrderedDict[str, AioProver] = OrderedDict()
        """Provers by the caller's token; the key "" has the prover of the dashboard's token."""

    async def call(self, method: Method, request: Any, token: str = "") -> Any:
        call = self._channel.unary_unary(f"/{method.path}", _to_bytes, method.response.FromString)
        limit_s = LONG_CALL_S if method.path in LONG_CALLS else CALL_S
        made = lambda sent: call(request, timeout=limit_s, metadata=sent)  # noqa: E731
        return await self._prover(token).call(method.path, made, limit_s)

    async def stream(self, method: Method, request: Any, token: str = "") -> AsyncIterator[Any]:
        call = self._channel.unary_stream(f"/{method.path}", _to_bytes, method.response.FromString)
        prover = self._prover(token)
        signed = await prover.sign(method.path)
        responses = call(request, metadata=signed.metadata)
        await prover.check_stream(responses, signed)
        async for response in responses:
            yield response

    async def close(self) -> None:
        await self._channel.close(None)

    def _prover(self, token: str) -> AioProver:
        if token not in self._provers:
            known = known_token(self._address, self._token_file, token=token)
            self._provers[token] = AioProver(self._channel, self._address, known)
        self._provers.move_to_end(token)
        while len(self._provers) > MAX_TOKENS:
            self._provers.popitem(last=False)
        return self._provers[token]


Backend: TypeAlias = "CoordinatorBackend | LedgerCalls"


def _to_bytes(message: Any) -> bytes:
    content: bytes = message.SerializeToString()
    return content


MODULES = (run_pb2, records_pb2, status_pb2, worker_pb2, bundle_pb2, registry_pb2, access_pb2)


@dataclass(frozen=True)
class Method:
    path: str
    """Name of the call, `package.Service/Method`."""
    request: type[Any]
    response: type[Any]
    streams: bool
    only_reads: bool


def methods() -> Mapping[str, Method]:
    found = {}
    for module in MODULES:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                if method.client_streaming:
                    continue
                path = f"{service.full_name}/{method.name}"
                if path in OF_CALLERS:
                    continue
                level = method.GetOptions().idempotency_level
                found[path] = Method(
                    path,
                    message_factory.GetMessageClass(method.input_type),
                    message_factory.GetMessageClass(method.output_type),
                    bool(method.server_streaming),
                    level == MethodOptions.NO_SIDE_EFFECTS,
                )
    return found


INT64 = (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64)
NUMBERS = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)


@cache
def document() -> dict[str, Any]:
    comments, paths = _comments(), dict[str, Any]()
    schemas: dict[str, Any] = {}
    for path, method in methods().items():
        service, _, name = path.rpartition("/")
        content = {
            "text/event-stream" if method.streams else "application/json": {
                "schema": _reference(method.response.DESCRIPTOR, schemas, comments)
            }
        }
        paths[f"/{path}"] = {
            "post": {
                "operationId": path.replace("/", "."),
                "tags": [service],
                "summary": comments.get(f"{service.rpartition('.')[2]}.{name}", ""),
                "requestBody": {
                    "content": {
                        "application/json": {"schema": _reference(method.request.DESCRIPTOR, schemas, comments)}
                    }
                },
                "responses": {
                    "200": {"description": "The response.", "content": content},
                    "default": {
                        "description": "Code and message, as in Connect.",
                        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
                    },
                },
                "x-only-reads": method.only_reads,
            }
        }
    schemas["Error"] = {
        "type": "object",
        "properties": {"code": {"type": "string"}, "message": {"type": "string"}},
        "required": ["code", "message"],
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Paceline", "version": __version__},
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "schemas": dict(sorted(schemas.items())),
        },
    }


def _reference(descriptor: Descriptor, schemas: dict[str, Any], comments: dict[str, str]) -> dict[str, Any]:
    """Return a reference to a message's schema; add that schema and all schemas that it refers to."""
    name = descriptor.full_name
    if name not in schemas:
        schema: dict[str, Any] = {"type": "object", "description": comments.get(descriptor.name, "")}
        schemas[name] = schema  # added before its fields, because messages may refer to themselves
        schema["properties"] = {field.json_name: _field(field, schemas, comments) for field in descriptor.fields}
    return {"$ref": f"#/components/schemas/{name}"}


def _field(field: FieldDescriptor, schemas: dict[str, Any], comments: dict[str, str]) -> dict[str, Any]:
    owner = field.containing_type
    comment = comments.get(f"{owner.name}.{field.name}", "") if owner is not None else ""
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        values = _value(message.fields_by_name["value"], schemas, comments)
        return {"type": "object", "additionalProperties": values, "description": comment}
    value = _value(field, schemas, comments)
    if field.is_repeated:
        return {"type": "array", "items": value, "description": comment}
    return value | {"description": comment}


def _value(field: FieldDescriptor, schemas: dict[str, Any], comments: dict[str, str]) -> dict[str, Any]:
    if field.message_type is not None:
        return _reference(field.message_type, schemas, comments)
    if field.enum_type is not None:
        return {"type": "string", "enum": [value.name for value in field.enum_type.values]}
    if field.type in INT64:  # ProtoJSON writes them as strings, because JavaScript's numbers are too small
        return {"type": "string", "format": "int64"}
    if field.type in NUMBERS:
        return {"oneOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
    if field.type == FieldDescriptor.TYPE_BOOL:
        return {"type": "boolean"}
    if field.type == FieldDescriptor.TYPE_STRING:
        return {"type": "string"}
    if field.type == FieldDescriptor.TYPE_BYTES:
        return {"type": "string", "contentEncoding": "base64"}
    return {"type": "integer"}


def _comments() -> dict[str, str]:
    """Map `Message`, `Service.Method` and `Message.field` to the comment before this message, rpc or field."""
    names = [Path(module.DESCRIPTOR.name).name for module in (*MODULES, common_pb2)]
    return {key: text for name in names for key, text in comments_of(PROTOS / name).items()}


def comments_of(path: Path) -> dict[str, str]:
    """Map `Owner` and `Owner.member` to the comment before this message, rpc, field or value."""
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
        elif stripped.endswith("{"):  # a oneof, or the options of an rpc
            owners.append(owners[-1] if owners else "")
        elif stripped.startswith("}") and owners:
            owners.pop()
        lines = []
    return found

"""The OpenAPI document of the REST interface, made from the protos: their descriptors, and the comments of their files."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from paceline import __version__
from paceline.apps.dashboard.backends import MODULES, methods
from paceline.v1 import common_pb2

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
                        "application/json": {
                            "schema": _reference(method.request.DESCRIPTOR, schemas, comments)
                        }
                    }
                },
                "responses": {
                    "200": {"description": "The response.", "content": content},
                    "default": {
                        "description": "Code and message, as Connect has them.",
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
    """Return a reference to a message's schema, which is added with all that it refers to."""
    name = descriptor.full_name
    if name not in schemas:
        schema: dict[str, Any] = {"type": "object", "description": comments.get(descriptor.name, "")}
        schemas[name] = schema  # before its fields, because messages may refer to themselves
        schema["properties"] = {
            field.json_name: _field(field, schemas, comments) for field in descriptor.fields
        }
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
        return _enum(field.enum_type)
    if field.type in INT64:  # ProtoJSON writes them as texts, because JavaScript's numbers are too small
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


def _enum(descriptor: EnumDescriptor) -> dict[str, Any]:
    return {"type": "string", "enum": [value.name for value in descriptor.values]}


def _comments() -> dict[str, str]:
    """Return the comment before each message, rpc and field, by `Message`, `Service.Method` and `Message.field`."""
    from paceline.services.cli.reference import FOLDER, comments_of

    names = [Path(module.DESCRIPTOR.name).name for module in (*MODULES, common_pb2)]
    return {key: text for name in names for key, text in comments_of(FOLDER / name).items()}

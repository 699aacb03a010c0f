"""The calls of the coordinator that have an HTTP path, from the descriptors of its services.

`POST /paceline.v1.RunService/List` is the unary wire of Connect: its clients work. Calls that take a stream have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import MethodOptions

from paceline.v1 import (
    access_pb2,
    bundle_pb2,
    records_pb2,
    registry_pb2,
    run_pb2,
    status_pb2,
    worker_pb2,
)

MODULES = (run_pb2, records_pb2, status_pb2, worker_pb2, bundle_pb2, registry_pb2, access_pb2)


@dataclass(frozen=True)
class Method:
    """One call."""

    path: str
    """`package.Service/Method`."""
    request: type[Any]
    response: type[Any]
    streams: bool
    """True when it answers with a stream."""
    only_reads: bool


def methods() -> Mapping[str, Method]:
    """Return the calls by their path."""
    found = {}
    for module in MODULES:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                if method.client_streaming:
                    continue
                path = f"{service.full_name}/{method.name}"
                level = method.GetOptions().idempotency_level
                found[path] = Method(
                    path,
                    message_factory.GetMessageClass(method.input_type),
                    message_factory.GetMessageClass(method.output_type),
                    bool(method.server_streaming),
                    level == MethodOptions.NO_SIDE_EFFECTS,
                )
    return found

"""Where the dashboard's answers come from: a coordinator, or a ledger (`paceline.services.local.ledger_calls`).

The calls with an HTTP path are those of the services' descriptors. `POST
/paceline.v1.RunService/List` is the unary wire of Connect: its clients work. Calls that take a stream have none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import MethodOptions

from paceline.calls.token import metadata, read_token
from paceline.services.common.serving.grpc_server import CHANNEL_OPTIONS
from paceline.tls.channels import RenewedChannel, open_aio_channel
from paceline.v1 import (
    access_pb2,
    bundle_pb2,
    records_pb2,
    registry_pb2,
    run_pb2,
    status_pb2,
    worker_pb2,
)

if TYPE_CHECKING:
    from paceline.services.local.ledger_calls import LedgerCalls

CALL_S, LONG_CALL_S = 60.0, 3600.0
LONG_CALLS = ("paceline.v1.RecordsService/VerifyRun", "paceline.v1.RunService/Submit")


class CoordinatorBackend:
    """A coordinator, which may restart meanwhile. Methods raise PacelineError or grpc.aio.AioRpcError; without a caller's `token` the
    dashboard's is used."""

    def __init__(self, address: str, token_file: Path):
        self._channel = RenewedChannel(lambda: open_aio_channel(address, CHANNEL_OPTIONS))
        self._token_file = token_file

    async def call(self, method: Method, request: Any, token: str = "") -> Any:
        call = self._channel.unary_unary(f"/{method.path}", _to_bytes, method.response.FromString)
        limit_s = LONG_CALL_S if method.path in LONG_CALLS else CALL_S
        return await call(request, timeout=limit_s, metadata=self._metadata(token))

    async def stream(self, method: Method, request: Any, token: str = "") -> AsyncIterator[Any]:
        call = self._channel.unary_stream(f"/{method.path}", _to_bytes, method.response.FromString)
        async for response in call(request, metadata=self._metadata(token)):
            yield response

    async def close(self) -> None:
        await self._channel.close(None)

    def _metadata(self, token: str) -> Any:
        return metadata(token or read_token(self._token_file))


Backend: TypeAlias = "CoordinatorBackend | LedgerCalls"
"""What answers calls."""


def _to_bytes(message: Any) -> bytes:
    content: bytes = message.SerializeToString()
    return content


MODULES = (run_pb2, records_pb2, status_pb2, worker_pb2, bundle_pb2, registry_pb2, access_pb2)


@dataclass(frozen=True)
class Method:
    path: str
    """`package.Service/Method`."""
    request: type[Any]
    response: type[Any]
    streams: bool
    """True when it answers with a stream."""
    only_reads: bool


def methods() -> Mapping[str, Method]:
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

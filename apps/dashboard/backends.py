"""Where the dashboard's answers come from: a coordinator, or a ledger (`paceline.services.local.ledger_calls`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

from paceline.apps.dashboard.methods import Method
from paceline.calls.token import metadata, read_token
from paceline.services.common.serving.grpc_server import CHANNEL_OPTIONS
from paceline.tls.channels import RenewedChannel, open_aio_channel

CALL_S, LONG_CALL_S = 60.0, 3600.0
LONG_CALLS = ("paceline.v1.RecordsService/VerifyRun", "paceline.v1.RunService/Submit")


class Backend(Protocol):
    """Answers calls. Methods raise PacelineError or grpc.aio.AioRpcError."""

    async def call(self, method: Method, request: Any, token: str = "") -> Any:
        """Return the response. `token` is the caller's; without one the dashboard's is used."""

    def stream(self, method: Method, request: Any, token: str = "") -> AsyncIterator[Any]:
        """Yield the responses."""

    async def close(self) -> None:
        """Give up what it holds."""


class CoordinatorBackend:
    """A coordinator, which may restart meanwhile."""

    def __init__(self, address: str, token_file: Path):
        self._channel = RenewedChannel(lambda: open_aio_channel(address, CHANNEL_OPTIONS))
        self._token_file = token_file

    async def call(self, method: Method, request: Any, token: str = "") -> Any:
        """Return the response."""
        call = self._channel.unary_unary(f"/{method.path}", _to_bytes, method.response.FromString)
        limit_s = LONG_CALL_S if method.path in LONG_CALLS else CALL_S
        return await call(request, timeout=limit_s, metadata=self._metadata(token))

    async def stream(self, method: Method, request: Any, token: str = "") -> AsyncIterator[Any]:
        """Yield the responses."""
        call = self._channel.unary_stream(f"/{method.path}", _to_bytes, method.response.FromString)
        async for response in call(request, metadata=self._metadata(token)):
            yield response

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close(None)

    def _metadata(self, token: str) -> Any:
        return metadata(token or read_token(self._token_file))


def _to_bytes(message: Any) -> bytes:
    content: bytes = message.SerializeToString()
    return content

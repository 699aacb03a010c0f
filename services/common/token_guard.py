"""Refuses calls without the token, before anything of their content is read. Health and reflection stay open."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from paceline.token import KEY, VARIABLE, is_said, read_token, token_path

OPEN = ("/grpc.health.", "/grpc.reflection.")


class TokenGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic for its types only
    """`read` gives the token that a call has to carry; while it is empty, every call is refused."""

    def __init__(self, read: Callable[[], str], file: Path):
        """`file` is the name of the token's file on this host, for whoever is refused."""
        self._read = read
        self._file = file.resolve()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The method's own handler, or one of the same kind that refuses."""
        details: Any = handler_call_details
        handler = await continuation(details)
        if handler is None or details.method.startswith(OPEN):
            return handler
        said = dict(details.invocation_metadata or ()).get(KEY, "")
        token = self._read()
        if is_said(str(said), token):
            return handler
        if not token:
            why = f"this service has no token: its file {self._file} is not there, so it answers nobody"
        else:
            why = f"the call has {'another' if said else 'no'} token; this service wants the one in its file {self._file}"
        return _refusing(handler, f"{why}. Give that file with --token-file or {VARIABLE}")


def worker_guard() -> TokenGuard:
    """For the services of a worker: the token that it says to the coordinator itself."""
    return TokenGuard(lambda: read_token(token_path()), token_path())


def _refusing(handler: Any, why: str) -> grpc.RpcMethodHandler[Any, Any]:
    """As if requests came in streams, whatever the method has: a single one would be read whole before the handler is asked."""

    async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, why)

    async def refuse_stream(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, why)
        yield  # an asynchronous generator is what a stream's handler has to be

    streams = handler.response_streaming
    make: Any = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
    refusing: grpc.RpcMethodHandler[Any, Any] = make(
        refuse_stream if streams else refuse,
        handler.request_deserializer,
        handler.response_serializer,
    )
    return refusing

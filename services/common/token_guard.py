"""Refusal of calls without the token, before any of their content is read. Health and reflection stay open."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from paceline.token import KEY, VARIABLE, is_authorized, read_token, token_path

OPEN = ("/grpc.health.", "/grpc.reflection.")


class TokenGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic for its types only
    """`read` returns the token that a call has to carry; while it is empty, every call is refused."""

    def __init__(self, read: Callable[[], str], file: Path):
        """`file` is the name of the token's file on this host, for the message to refused callers."""
        self._read = read
        self._file = file.resolve()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the method's handler, or a handler of the same kind that refuses."""
        details: Any = handler_call_details
        handler = await continuation(details)
        if handler is None or details.method.startswith(OPEN):
            return handler
        sent = dict(details.invocation_metadata or ()).get(KEY, "")
        token = self._read()
        if is_authorized(str(sent), token):
            return handler
        if not token:
            why = f"this service has no token: its file {self._file} is not there, so it refuses every call"
        else:
            why = f"the call has {'another' if sent else 'no'} token; this service requires the token in its file {self._file}"
        return _refusing(handler, f"{why}. Give that file with --token-file or {VARIABLE}")


def worker_guard() -> TokenGuard:
    """Return the guard of a worker's services: they require the token that the worker sends to the coordinator."""
    return TokenGuard(lambda: read_token(token_path()), token_path())


def _refusing(handler: Any, why: str) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler that refuses. It takes a stream of requests whatever the method has, because a single request
    would be read whole before the handler is called."""

    async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, why)

    async def refuse_stream(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, why)
        yield  # a stream's handler has to be an asynchronous generator

    streams = handler.response_streaming
    make: Any = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
    refusing: grpc.RpcMethodHandler[Any, Any] = make(
        refuse_stream if streams else refuse,
        handler.request_deserializer,
        handler.response_serializer,
    )
    return refusing

"""The outermost interceptor of a server: it frees what an aborted call holds.

gRPC keeps the exception of an aborted call in the state of the call. The exception's traceback, and that of the error before it, hold
frames that hold the call's context, which holds that state: a cycle of some 60 objects and 10 kB for each refused call, which waits
for the collector of cycles. So both tracebacks are cut off; their texts are in the status and in the log by then.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc


class OutermostInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic for its types only
    """The interceptor; it has to be the first."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler that calls the method's handler."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            handler = grpc.stream_stream_rpc_method_handler(_refuse)
        call = method_of(handler)

        # The frames of these two are in the traceback again, so they drop what refers to the call.
        async def answer(request: Any, context: Any) -> Any:
            answered = call(request, context)
            del request, context
            try:
                return await answered
            except grpc.aio.AbortError as error:
                _cut_off(error)
                raise

        async def answer_stream(request: Any, context: Any) -> Any:
            responses = call(request, context)
            del request, context
            try:
                async with contextlib.aclosing(responses):
                    async for response in responses:
                        yield response
            except grpc.aio.AbortError as error:
                _cut_off(error)
                raise

        return handler_with(handler, answer, answer_stream)


def method_of(handler: Any) -> Any:
    """Return the function of a method's handler."""
    return handler.unary_unary or handler.stream_unary or handler.unary_stream or handler.stream_stream


def handler_with(handler: Any, answer: Any, answer_stream: Any) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler of the same kind with another function: `answer_stream` in place of an asynchronous generator, `answer` in
    place of a coroutine."""
    call = answer_stream if inspect.isasyncgenfunction(method_of(handler)) else answer
    kinds = (_many(handler.request_streaming), _many(handler.response_streaming))
    make: Any = getattr(grpc, f"{kinds[0]}_{kinds[1]}_rpc_method_handler")
    made: grpc.RpcMethodHandler[Any, Any] = make(
        call, handler.request_deserializer, handler.response_serializer
    )
    return made


async def _refuse(_requests: Any, context: Any) -> Any:
    """Answer a call of a method that nobody has."""
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    yield  # makes it a stream


def _cut_off(error: BaseException) -> None:
    error.__traceback__ = error.__context__ = error.__cause__ = None


def _many(streaming: bool) -> str:
    return "stream" if streaming else "unary"

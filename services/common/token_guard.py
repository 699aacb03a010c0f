"""The check of every call before any of its content is read: whose token it carries, and whether that caller may make it.

Health and reflection stay open. `services/common/access/rights.py` says who may call what. Streams end when their caller's token
is revoked or expires: a task looks at their callers every RECHECK_S while there are any.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from paceline.errors import AccessDenied, InvalidInput, NotPermitted, PacelineError, Unavailable
from paceline.token import KEY
from services.common.access.caller import Caller, CallerRole, set_caller
from services.common.access.callers import Callers
from services.common.access.rights import RPCS, Right
from services.common.access.worker_callers import WorkerCallers

OPEN = ("/grpc.health.", "/grpc.reflection.")
RECHECK_S = 1.0

STATUS = (
    (AccessDenied, grpc.StatusCode.UNAUTHENTICATED),
    (NotPermitted, grpc.StatusCode.PERMISSION_DENIED),
    (InvalidInput, grpc.StatusCode.INVALID_ARGUMENT),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
)
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class Call:
    """A call, for the audit log."""

    method: str
    caller: Caller | None
    peer: str
    request: Any
    """Its message; None for one that was not read, and for a stream."""
    code: grpc.StatusCode
    details: str


@dataclass(eq=False)
class _Stream:
    caller: Caller
    task: asyncio.Task[Any]
    refusal: str = ""


class TokenGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic for its types only
    """The guard of one server."""

    def __init__(
        self,
        callers: Callers,
        owner: Callable[[str], str] = lambda run_id: "",
        note: Callable[[Call], None] = lambda call: None,
        rights: Mapping[str, Right] = RPCS,
    ):
        """`owner` returns the name of a run's submitter, empty for one that is not on record. `note` takes refused calls
        and those that change something; it must not block."""
        self._callers, self._owner, self._note, self._rights = callers, owner, note, rights
        self._streams: set[_Stream] = set()
        self._watching: asyncio.Task[None] | None = None

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler that checks the call, then calls the method's handler."""
        details: Any = handler_call_details
        handler: Any = await continuation(details)
        if handler is None or details.method.startswith(OPEN):
            return handler  # type: ignore[no-any-return]
        sent = str(dict(details.invocation_metadata or ()).get(KEY, ""))
        return self._guarded(handler, details.method.lstrip("/"), sent.removeprefix("Bearer "))

    def _guarded(self, handler: Any, method: str, token: str) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the guarded handler. It takes a stream of requests whatever the method has, because a single request
        would be read whole before the handler is called."""

        async def answer(requests: AsyncIterator[Any], context: Context) -> Any:
            caller, request = await self._admit(handler, method, token, requests, context)
            with self._noted(method, caller, request, handler, context):
                return await (handler.unary_unary or handler.stream_unary)(request, context)

        async def answer_stream(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            caller, request = await self._admit(handler, method, token, requests, context)
            stream = self._watch(caller)
            try:
                with self._noted(method, caller, request, handler, context):
                    responses = (handler.unary_stream or handler.stream_stream)(request, context)
                    async with contextlib.aclosing(responses):
                        async for response in responses:
                            yield response
            except asyncio.CancelledError:
                if not stream.refusal:
                    raise
                stream.task.uncancel()
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, stream.refusal)
            finally:
                self._streams.discard(stream)

        streams = handler.response_streaming
        make: Any = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
        guarded: grpc.RpcMethodHandler[Any, Any] = make(
            answer_stream if streams else answer, handler.request_deserializer, handler.response_serializer
        )
        return guarded

    async def _admit(
        self, handler: Any, method: str, token: str, requests: AsyncIterator[Any], context: Context
    ) -> tuple[Caller, Any]:
        """Return the caller and the request (or the stream of requests) of a permitted call; abort any other."""
        caller: Caller | None = None
        request: Any = None
        try:
            caller = await self._callers.caller(token)
            right = self._rights.get(method)
            _check_role(method, right, caller)
            set_caller(caller)
            if handler.request_streaming:
                return caller, requests
            request = await anext(aiter(requests), None)
            if request is None:
                raise InvalidInput(f"{method} takes one message, and none came")
            if right is not None and right.own_run and not caller.steers_all:
                self._check_owner(caller, request.run_id)
            return caller, request
        except (AccessDenied, NotPermitted, InvalidInput, Unavailable) as error:
            code = next(code for kind, code in STATUS if isinstance(error, kind))
            self._note(Call(method, caller, context.peer(), request, code, str(error)))
            await context.abort(code, str(error))
            raise  # not reached: `abort` raises

    def _check_owner(self, caller: Caller, run_id: str) -> None:
        """Raises NotPermitted for a run of somebody else."""
        try:
            owner = self._owner(run_id)
        except PacelineError:  # no such run, which the method itself says
            return
        if owner != caller.name:
            raise NotPermitted(
                f"run {run_id[:80]!r} is not a run of {caller.name}, and a submitter steers their own runs alone; an "
                "operator may do it"
            )

    @contextlib.contextmanager
    def _noted(self, method: str, caller: Caller, request: Any, handler: Any, context: Context) -> Any:
        """Note a call that changes something, with its result: a single answer's at its end, a stream's at its beginning."""
        right = self._rights.get(method)
        if right is None or not right.changes:
            yield
            return
        message = None if handler.request_streaming else request
        if handler.response_streaming:
            self._note(Call(method, caller, context.peer(), message, grpc.StatusCode.OK, "begins"))
            yield
            return
        ended = False
        try:
            yield
            ended = True
        finally:
            code: Any = context.code() or (grpc.StatusCode.OK if ended else grpc.StatusCode.UNKNOWN)
            if isinstance(code, int):
                code = next(each for each in grpc.StatusCode if each.value[0] == code)
            details = context.details() or ""
            text = details.decode(errors="replace") if isinstance(details, bytes) else str(details)
            self._note(Call(method, caller, context.peer(), message, code, text))

    def _watch(self, caller: Caller) -> _Stream:
        """Note a stream, which ends when its caller does not count any more."""
        task = asyncio.current_task()
        assert task is not None, "gRPC answers each call in a task"
        stream = _Stream(caller, task)
        self._streams.add(stream)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._end_revoked())
        return stream

    async def _end_revoked(self) -> None:
        refusal = getattr(self._callers, "refusal", None)
        while self._streams and refusal is not None:
            await asyncio.sleep(RECHECK_S)
            for stream in list(self._streams):
                if not stream.refusal and (why := refusal(stream.caller)):
                    stream.refusal = why
                    stream.task.cancel()


def worker_guard(coordinator: str = "") -> TokenGuard:
    """Return the guard of a worker's services: the coordinator says who a caller is."""
    return TokenGuard(WorkerCallers(coordinator))


def _check_role(method: str, right: Right | None, caller: Caller) -> None:
    """Raises NotPermitted."""
    if right is None:
        raise NotPermitted(f"nobody may call {method}: it has no row in services/common/access/rights.py")
    if not right.roles & caller.roles:
        allowed = ", ".join(role for role in CallerRole if role in right.roles)
        roles = ", ".join(sorted(caller.roles)) or "none"
        raise NotPermitted(
            f"{method} is for the roles {allowed}; {caller.name} has {roles}. Use another token, or ask an operator for one"
        )

"""Checks the caller and the rights (`services/common/access/rights.py`) of every call before its content is read. A
caller proves its token or its ticket (`services/common/access/sessions.py`), or sends the token. Health, reflection and
the server's own proof are open to everybody. While there are streams, the coordinator checks their callers every
RECHECK_S, and ends a stream whose caller's token or certificate was revoked or has expired; a worker's service checks
only when a stream begins."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

from paceline.calls.proof import PROOF, PROVE, RENEW, SESSION
from paceline.calls.token import KEY
from paceline.errors import (
    AccessDenied,
    Busy,
    Conflict,
    InvalidInput,
    NotFound,
    NotPermitted,
    PacelineError,
    Unavailable,
    WireError,
)
from paceline.rate_limited_log import RateLimitedLog
from paceline.services.common.access.callers import Callers, WorkerCallers
from paceline.services.common.access.rights import RPCS, Caller, CallerRole, Right, set_caller
from paceline.services.common.access.sessions import Keys, Sessions
from paceline.services.common.access.tls import address_of, certificate_name

OPEN = ("/grpc.health.", "/grpc.reflection.")
RECHECK_S = 1.0
MESSAGE_S = 60.0
"""Seconds in which the message of a permitted call must arrive; a stream's handler waits for each message itself."""
OF_GUARD = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
"""Statuses of calls that are refused because of their caller."""
ENDS_OF_STREAMS = (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN)
"""Statuses of a stream that ends without a refusal: its peer left or disappeared, or this service stops."""

Context = grpc.aio.ServicerContext[Any, Any]
Continuation = Callable[[grpc.HandlerCallDetails], "Awaitable[grpc.RpcMethodHandler[Any, Any]]"]
seldom = RateLimitedLog(logging.getLogger(__name__))


@dataclass(frozen=True)
class Call:
    """A call, as the audit log records it."""

    method: str
    caller: Caller | None
    peer: str
    request: Any
    """Message of the call, or the first message of a stream; None if no message was read."""
    code: grpc.StatusCode
    details: str
    certificate: str = ""
    """Name in the caller's client certificate; empty without a certificate."""
    answer: Any = None
    """Message that answered the call; None for a stream of answers, and for a refused call."""


class _Requests:
    """Iterator over the requests of a call, starting with the request that was already read."""

    def __init__(self, requests: AsyncIterator[Any]):
        self._requests: Any = aiter(requests)
        self.first: Any = None

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        request = await anext(self._requests)
        if self.first is None:
            self.first = request
        return request

    async def close(self) -> None:
        """Free gRPC's data of the call: receiver and generator refer to each other until the generator's end."""
        with contextlib.suppress(RuntimeError):  # another task of the call's handler is still reading
            await self._requests.aclose()


@dataclass
class _Noted:
    """A call in progress that changes something."""

    method: str
    caller: Caller
    context: Context
    requests: Any
    has_begun: bool = False
    answer: Any = None

    @property
    def request(self) -> Any:
        return self.requests.first if isinstance(self.requests, _Requests) else self.requests


@dataclass(eq=False)
class _Stream:
    caller: Caller
    task: asyncio.Task[Any]
    refusal: str = ""


class CallersWithKeys(Callers, Keys, Protocol):
    """Callers that send a token or prove it."""


class TokenGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic for its types only
    def __init__(
        self,
        callers: CallersWithKeys,
        owner: Callable[[str], str] = lambda run_id: "",
        note: Callable[[Call], None] = lambda call: None,
        rights: Mapping[str, Right] = RPCS,
        message_s: float = MESSAGE_S,
    ):
        """`owner` returns the name of a run's submitter, empty for an unknown run. `note` gets refused calls and calls
        that change something; it must not block. `message_s` is the longest wait for the message of a call."""
        self._message_s = message_s
        self._callers, self._owner, self._note, self._rights = callers, owner, note, rights
        self.sessions = Sessions(callers)
        self._streams: set[_Stream] = set()
        self._watching: asyncio.Task[None] | None = None

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any]:
        details: Any = handler_call_details
        if details.method == PROVE:
            return grpc.stream_unary_rpc_method_handler(self._prove)
        handler: Any = await continuation(details)
        sent = dict(details.invocation_metadata or ())
        if details.method.startswith(OPEN) or (handler is None and SESSION not in sent):
            return handler  # type: ignore[no-any-return]
        handler = handler or grpc.stream_unary_rpc_method_handler(_unimplemented)  # a proven answer too
        return self._guarded(handler, details.method.lstrip("/"), sent)

    async def _prove(self, requests: AsyncIterator[Any], context: Context) -> bytes:
        """Answer `Prove`, to anybody; the request is not read."""
        try:
            offer: Any = dict(context.invocation_metadata() or ()).get(SESSION, b"")
            return self.sessions.answer(offer).SerializeToString()
        except AccessDenied as denied:
            code = grpc.StatusCode.UNAUTHENTICATED
            self._note(Call(PROVE.lstrip("/"), None, context.peer(), None, code, str(denied)))
            await context.abort(code, str(denied))
            raise  # not reached: `abort` raises
        finally:
            await _Requests(requests).close()

    async def _caller(self, method: str, sent: Mapping[str, Any], certificate: str, context: Context) -> Caller:
        """Return the caller of a call with these metadata; if the caller proves itself, prove this server in the
        answer. Raises AccessDenied, Unavailable."""
        if SESSION not in sent:
            return await self._callers.caller(str(sent.get(KEY, "")).removeprefix("Bearer "), certificate)
        context.set_trailing_metadata(((RENEW, "1"),))
        offer, answer = self.sessions.check(sent[SESSION], sent.get(PROOF, b""), method)
        context.set_trailing_metadata(((PROOF, answer),))
        return await self._callers.proven(offer, method, certificate)

    def _guarded(self, handler: Any, method: str, sent: Mapping[str, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the guarded handler; it takes streams, because gRPC reads a single request before it calls a handler."""

        async def answer(requests: AsyncIterator[Any], context: Context) -> Any:
            received = _Requests(requests)
            try:
                caller, request = await self._admit(handler, method, sent, received, context)
                with self._noted(method, caller, request, context) as noted:
                    noted.answer = await (handler.unary_unary or handler.stream_unary)(request, context)
                    return noted.answer
            finally:
                await received.close()

        async def answer_stream(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            received = _Requests(requests)
            stream: _Stream | None = None
            try:
                caller, request = await self._admit(handler, method, sent, received, context)
                stream = self._watch(caller)
                with self._noted(method, caller, request, context) as noted:
                    responses = (handler.unary_stream or handler.stream_stream)(request, context)
                    async with contextlib.aclosing(responses):
                        async for response in responses:
                            if not noted.has_begun:
                                noted.has_begun = True
                                self._note_call(noted, grpc.StatusCode.OK, "begins")
                            yield response
            except asyncio.CancelledError:
                if stream is None or not stream.refusal:
                    raise
                stream.task.uncancel()
                first = _Noted(method, caller, context, request)
                self._note_call(first, grpc.StatusCode.UNAUTHENTICATED, stream.refusal)
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, stream.refusal)
            finally:
                if stream is not None:
                    self._streams.discard(stream)
                await received.close()

        streams = handler.response_streaming
        make: Any = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
        guarded: grpc.RpcMethodHandler[Any, Any] = make(
            answer_stream if streams else answer, handler.request_deserializer, handler.response_serializer
        )
        return guarded

    async def _admit(
        self, handler: Any, method: str, sent: Mapping[str, Any], requests: _Requests, context: Context
    ) -> tuple[Caller, Any]:
        """Return caller and request (or stream of requests) of a permitted call; abort a call that is not permitted."""
        caller: Caller | None = None
        request: Any = None
        certificate = ""
        try:
            certificate = certificate_name(context)
            caller = await self._caller(method, sent, certificate, context)
            if handler.response_streaming and SESSION in sent:
                await context.send_initial_metadata(tuple(context.trailing_metadata() or ()))
            right = self._rights.get(method)
            if handler.stream_unary is not _unimplemented:
                _check_role(method, right, caller)
            set_caller(caller)
            if handler.request_streaming:
                return caller, requests
            request = await self._message(method, requests)
            if right is not None and right.own_run and not caller.steers_all:
                self._check_owner(caller, request.run_id)
            return caller, request
        except (AccessDenied, NotPermitted, InvalidInput, Unavailable) as error:
            code = status_of(error) or grpc.StatusCode.INTERNAL
            self._note(Call(method, caller, context.peer(), request, code, str(error), certificate))
            await context.abort(code, str(error))
            raise  # not reached: `abort` raises

    async def _message(self, method: str, requests: _Requests) -> Any:
        try:
            async with asyncio.timeout(self._message_s):
                request = await anext(requests, None)
        except TimeoutError:
            raise Unavailable(
                f"{method} takes one message, but no message came within {self._message_s:g} s; call again"
            ) from None
        if request is None:
            raise InvalidInput(f"{method} takes one message, but the call ended without a message")
        return request

    def _check_owner(self, caller: Caller, run_id: str) -> None:
        try:
            owner = self._owner(run_id)
        except PacelineError:  # no such run, which the method itself reports
            return
        if owner != caller.name:
            raise NotPermitted(
                f"run {run_id[:80]!r} is not a run of {caller.name}, and a submitter may control only their own runs; ask an operator"
            )

    @contextlib.contextmanager
    def _noted(self, method: str, caller: Caller, requests: Any, context: Context) -> Iterator[_Noted]:
        """Note the result of a call that changes something; of a stream, note the first answer and a fault that ends
        it."""
        right, noted = self._rights.get(method), _Noted(method, caller, context, requests)
        if right is None or not right.changes:
            noted.has_begun = True
            yield noted
            return
        end = grpc.StatusCode.UNKNOWN
        try:
            yield noted
            end = grpc.StatusCode.OK
        except asyncio.CancelledError:
            end = grpc.StatusCode.CANCELLED
            raise
        finally:
            code: Any = context.code() or end
            if isinstance(code, int):
                code = next(each for each in grpc.StatusCode if each.value[0] == code)
            if not noted.has_begun or code not in ENDS_OF_STREAMS:
                details = context.details() or ""
                text = details.decode(errors="replace") if isinstance(details, bytes) else str(details)
                self._note_call(noted, code, text)

    def _note_call(self, noted: _Noted, code: grpc.StatusCode, details: str) -> None:
        caller, peer, request = noted.caller, noted.context.peer(), noted.request
        self._note(Call(noted.method, caller, peer, request, code, details, caller.certificate, noted.answer))

    def _watch(self, caller: Caller) -> _Stream:
        """Register a stream, which ends when its caller is no longer valid."""
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


def worker_guard(coordinator: str = "", call_key: Callable[[], bytes] = bytes) -> TokenGuard:
    """Return the guard of a worker's services. It asks the coordinator who a caller is, and logs refused calls.
    `call_key` is as in `WorkerCallers`."""
    return TokenGuard(WorkerCallers(coordinator, call_key), note=_log_refusal)


def _log_refusal(call: Call) -> None:
    if call.code in OF_GUARD:
        seldom.warning("call", "refused a call of %s from %s: %s", call.method, address_of(call.peer), call.details)


async def _unimplemented(requests: Any, context: Context) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server does not have the method")


def _check_role(method: str, right: Right | None, caller: Caller) -> None:
    if right is None:
        raise NotPermitted(f"nobody may call {method}: it has no row in services/common/access/rights.py")
    check_roles(method, right.roles, caller, ". Use another token, or ask an operator for a token")


def check_roles(what: str, allowed: frozenset[CallerRole], caller: Caller, remedy: str = "") -> None:
    """Raise NotPermitted if the caller of a gRPC call or an HTTP request has none of the `allowed` roles."""
    if not allowed & caller.roles:
        roles = ", ".join(role for role in CallerRole if role in allowed)
        has = ", ".join(sorted(caller.roles)) or "none"
        raise NotPermitted(f"{what} is for the roles {roles}; {caller.name} has {has}{remedy}")


STATUS: Sequence[tuple[type[Exception], grpc.StatusCode]] = (
    (DecodeError, grpc.StatusCode.INVALID_ARGUMENT),  # raised by a message in a stream
    (InvalidInput, grpc.StatusCode.INVALID_ARGUMENT),
    (WireError, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (Conflict, grpc.StatusCode.FAILED_PRECONDITION),
    (Busy, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (AccessDenied, grpc.StatusCode.UNAUTHENTICATED),
    (NotPermitted, grpc.StatusCode.PERMISSION_DENIED),
    (PacelineError, grpc.StatusCode.INTERNAL),
)
"""gRPC status for each type of error; the first type that matches counts."""


def status_of(error: Exception) -> grpc.StatusCode | None:
    """Return the status of an error; None for an unexpected error."""
    return next((code for kind, code in STATUS if isinstance(error, kind)), None)

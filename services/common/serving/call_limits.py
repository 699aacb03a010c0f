"""Limits the calls of a gRPC server: their rate for each caller and method, and their number in progress.

Promise: a call beyond a limit is refused before its handler runs, with RESOURCE_EXHAUSTED and the time after which it
may be accepted, and the data kept here is bounded. A caller is identified by the token guard; a call that needs no
caller (health, reflection), by the peer's address.

The outermost interceptor drops the tracebacks of an aborted call's exceptions. Otherwise there is a cycle of some 10 kB
that waits for the garbage collector: gRPC keeps the exceptions in the state of the call, and the frames of the
tracebacks hold this state. The texts of the exceptions are in the status and in the log by then.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import grpc

from paceline.calls.backoff import to_metadata
from paceline.errors import USUAL_S
from paceline.rate_limited_log import RateLimitedLog
from paceline.services.common.access.rights import current_caller
from paceline.services.common.access.tls import host_of
from paceline.services.common.access.token_guard import Continuation

MAX_KEPT = 8192
"""Largest number of pairs of caller and method that are counted; the counts that were idle the longest start again."""
NO_LIMIT = 1 << 31


@dataclass(frozen=True)
class Limit:
    """The limit on the calls of one method."""

    per_s: float
    """Calls a second that one caller may make continuously."""
    burst: int
    """Calls that one caller may make at once, before `per_s` limits further calls."""
    under_way: int
    """Largest number of calls of one caller in progress."""
    in_all: int
    """Largest number of calls of all callers together in progress."""


USUAL = Limit(per_s=200.0, burst=1000, under_way=256, in_all=1024)
"""Limit of a method without a row in LIMITS; one page of the dashboard makes some ten calls a second."""
STEERING = Limit(per_s=5.0, burst=200, under_way=32, in_all=128)
"""Limit of calls that read a spec, or write events."""
STREAM = Limit(per_s=20.0, burst=400, under_way=128, in_all=1024)
"""Limit of streams that a client keeps open."""
OPEN_STREAM = Limit(per_s=20.0, burst=100, under_way=16, in_all=64)
"""Limit of streams that need no token."""
BY_WORKERS = Limit(per_s=2000.0, burst=10_000, under_way=NO_LIMIT, in_all=NO_LIMIT)
"""Limit of calls by workers, which share a token and all call at once after the coordinator's restart. It is high
because the limit on open files bounds the members, and the engine's capacity the completions."""
LIMITS: Mapping[str, Limit] = MappingProxyType(
    {
        "paceline.v1.RunService/Submit": STEERING,
        "paceline.v1.RunService/Cancel": STEERING,
        "paceline.v1.RunService/Pause": STEERING,
        "paceline.v1.RunService/Resume": STEERING,
        "paceline.v1.RunService/DropGroups": STEERING,
        "paceline.v1.RunService/Checkpoint": STEERING,
        "paceline.v1.RunService/Watch": STREAM,
        "paceline.v1.ModelService/Register": STEERING,
        "paceline.v1.ModelService/Promote": STEERING,
        "paceline.v1.ModelService/Rollback": STEERING,
        "paceline.v1.WorkerService/Connect": BY_WORKERS,
        "paceline.v1.BundleService/Put": Limit(per_s=20.0, burst=400, under_way=64, in_all=256),
        "paceline.v1.BundleService/Fetch": BY_WORKERS,
        "paceline.v1.AccessService/Identify": BY_WORKERS,
        "paceline.v1.RolloutService/Generate": BY_WORKERS,
        "grpc.health.v1.Health/Watch": OPEN_STREAM,
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": OPEN_STREAM,
    }
)
"""Maps `package.Service/Method` to the limit of the method; a method without a row has the limit USUAL."""

seldom = RateLimitedLog(logging.getLogger(__name__))
Key = tuple[str, str]


class Rates:
    """The rate of each caller's calls of each method, by the generic cell rate algorithm. It keeps one number for each
    pair of caller and method: the earliest time at which all calls so far fit into the permitted continuous rate."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, max_kept: int = MAX_KEPT):
        self._clock, self._max_kept = clock, max_kept
        self._due_s: dict[Key, float] = {}

    def __len__(self) -> int:
        return len(self._due_s)

    def wait_s(self, key: Key, limit: Limit) -> float:
        """Count a call and return 0; for a call that comes too early, return the seconds to wait."""
        now_s = self._clock()
        due_s = max(now_s, self._due_s.pop(key, now_s))
        early_s = due_s - now_s - (limit.burst - 1) / limit.per_s
        if early_s <= 0:
            due_s += 1 / limit.per_s
        self._due_s[key] = due_s  # to the end: the first entries are those that were idle the longest
        if len(self._due_s) > self._max_kept:
            del self._due_s[next(iter(self._due_s))]
        return max(0.0, early_s)


class CallLimits(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic for its types only
    """Interceptor that enforces the limits of one server; it is the innermost one, so that the caller is known."""

    def __init__(self, limits: Mapping[str, Limit] = LIMITS, usual: Limit = USUAL, rates: Rates | None = None):
        self._limits, self._usual = limits, usual
        self._rates = Rates() if rates is None else rates
        self._under_way: Counter[Key] = Counter()
        self._in_all: Counter[str] = Counter()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any]:
        details: Any = handler_call_details
        handler: Any = await continuation(details)
        if handler is None:
            return None  # type: ignore[return-value]  # gRPC answers for unknown methods
        method = details.method.lstrip("/")
        call = method_of(handler)

        async def answer(request: Any, context: Any) -> Any:
            with await self._counted(method, context):
                return await call(request, context)

        async def answer_stream(request: Any, context: Any) -> Any:
            with await self._counted(method, context):
                async with contextlib.aclosing(call(request, context)) as responses:
                    async for response in responses:
                        yield response

        return handler_with(handler, answer, answer_stream)

    async def _counted(self, method: str, context: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a call counts as in progress; abort a call beyond its limit."""
        limit = self._limits.get(method, self._usual)
        caller = current_caller()
        key = caller.name if caller is not None else host_of(context.peer()), method
        refusal, wait_s = self._refusal(key, limit)
        if refusal:
            seldom.warning(f"limit/{method}", "%s", refusal)
            hint = (*to_metadata(wait_s), *(context.trailing_metadata() or ()))
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, refusal, hint)
        return self._taken(key)

    def _refusal(self, key: Key, limit: Limit) -> tuple[str, float]:
        """Return the reason why a call is refused, empty if it is accepted, and the seconds after which to call again."""
        who, method = key
        if self._in_all[method] >= limit.in_all:
            return (
                f"{limit.in_all} calls of {method} are in progress at this server, the maximum; try again later",
                USUAL_S,
            )
        if self._under_way[key] >= limit.under_way:
            return (
                f"{who} has {limit.under_way} calls of {method} in progress, the maximum; end a call, or try again later",
                USUAL_S,
            )
        if wait_s := self._rates.wait_s(key, limit):
            return (
                f"{who} calls {method} more than {limit.per_s:g} times a second; call again after {wait_s:.1f} s",
                wait_s,
            )
        return "", 0.0

    @contextlib.contextmanager
    def _taken(self, key: Key) -> Iterator[None]:
        counters: tuple[tuple[Counter[Any], Any], ...] = ((self._under_way, key), (self._in_all, key[1]))
        for counter, each in counters:
            counter[each] += 1
        try:
            yield
        finally:
            for counter, each in counters:
                counter[each] -= 1
                if not counter[each]:
                    del counter[each]


class OutermostInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic for its types only
    """Interceptor that frees the memory of aborted calls; it must be the first."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            handler = grpc.stream_stream_rpc_method_handler(_refuse)
        call = method_of(handler)

        # The frames of these two are in the traceback again, so they drop their references to the call.
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
    return handler.unary_unary or handler.stream_unary or handler.unary_stream or handler.stream_stream


def handler_with(handler: Any, answer: Any, answer_stream: Any) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler of the same kind: `answer_stream` replaces an asynchronous generator, `answer` a coroutine."""
    call = answer_stream if inspect.isasyncgenfunction(method_of(handler)) else answer
    kinds = (_many(handler.request_streaming), _many(handler.response_streaming))
    make: Any = getattr(grpc, f"{kinds[0]}_{kinds[1]}_rpc_method_handler")
    made: grpc.RpcMethodHandler[Any, Any] = make(call, handler.request_deserializer, handler.response_serializer)
    return made


async def _refuse(_requests: Any, context: Any) -> Any:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    yield  # makes it a stream


def _cut_off(error: BaseException) -> None:
    error.__traceback__ = error.__context__ = error.__cause__ = None


def _many(streaming: bool) -> str:
    return "stream" if streaming else "unary"

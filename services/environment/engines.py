"""Turns by rollout workers: the token source of leased groups.

Promise: a turn is asked for until it is there. A worker that drains answers with what it has, and another goes on from
there; a worker that dies, refuses or cannot be reached costs the tokens of its answer, and another is asked. Only two things
end a turn otherwise: the engines refuse the request itself (InvalidInput), or the lease cannot go on here (`LeaseLost`).

Order of waiting: a turn waits for a listed worker with new enough weights, then for its answer. An answer has no deadline,
because a long one is no fault: gRPC's keepalive ends a connection that is silent, and a worker ends itself when its engine
hangs (`services/rollout/run.py`).

A session stays with its worker, whose prefix cache has the session's history, for as long as that worker is listed, holds a
version that is new enough and has not just failed. A new session goes to the worker with the fewest sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc
import numpy as np

from paceline.calls.token import metadata, read_token, token_path
from paceline.environment.protocols import LeaseLost, SampledTurn, TurnRequest
from paceline.errors import InvalidInput
from paceline.groups import Version, VersionSpan
from paceline.rate_limited_log import RateLimitedLog
from paceline.services.common.serving.grpc_server import CHANNEL_OPTIONS, was_accepted
from paceline.tls.certificates import WORKER_HOST
from paceline.tls.channels import RenewedChannel, open_aio_channel
from paceline.v1 import common_pb2, rollout_pb2, rollout_pb2_grpc, worker_pb2


class Wanted(NamedTuple):
    """The weights that a lease asks for."""

    oldest_step: int = 0
    """Step of the oldest version that may sample for the lease."""
    pinned: Version | None = None
    """The only version that may, for an evaluation."""
    pinned_member: str = ""
    """The only worker that may, for an evaluation."""


@dataclass(frozen=True)
class Engine:
    """A rollout worker of the list."""

    member_id: str
    address: str
    version: Version

    def serves(self, wanted: Wanted) -> bool:
        """Return whether it may be asked, as far as the list knows."""
        if wanted.pinned is not None:
            return self.member_id == wanted.pinned_member and self.version == wanted.pinned
        return self.version.step >= wanted.oldest_step


class EngineList:
    """The list that the coordinator sent last, and which worker each session asks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._engines: dict[str, Engine] = {}
        self._session_engines: dict[str, str] = {}
        self._num_sessions: Counter[str] = Counter()
        self._failed_until_s: dict[str, float] = {}
        self.num_moved = 0
        """Sessions that have gone from one worker to another so far."""

    def __len__(self) -> int:
        return len(self._engines)

    def replace(self, addresses: Iterable[worker_pb2.EngineAddress]) -> None:
        """Take a new list. A worker that is on both keeps its sessions."""
        self._engines = {
            each.member_id: Engine(each.member_id, each.address, Version(each.version.session, each.version.step))
            for each in addresses
            if each.address
        }
        failed = self._failed_until_s.items()
        self._failed_until_s = {name: until_s for name, until_s in failed if name in self._engines}

    def put_off(self, member_id: str, seconds: float) -> None:
        """Ask others than this worker for a while, because it has just failed or refused."""
        self._failed_until_s[member_id] = self._clock() + seconds

    def choose(self, session: str, wanted: Wanted) -> Engine | None:
        """Return the worker to ask for the session's next turn; None while there is none."""
        now_s = self._clock()
        able = [
            engine
            for engine in self._engines.values()
            if engine.serves(wanted) and self._failed_until_s.get(engine.member_id, now_s) <= now_s
        ]
        if not able:
            return None
        before = self._session_engines.get(session)
        chosen = next((engine for engine in able if engine.member_id == before), None)
        if chosen is None:
            chosen = min(able, key=lambda engine: (self._num_sessions[engine.member_id], engine.member_id))
            self.num_moved += before is not None
            self.end_session(session)
            self._session_engines[session] = chosen.member_id
            self._num_sessions[chosen.member_id] += 1
        return chosen

    def seconds_until_retry(self, wanted: Wanted) -> float | None:
        """Return the seconds until a worker that was put off may be asked again; None where only another list helps."""
        now_s = self._clock()
        pauses = [
            self._failed_until_s[engine.member_id] - now_s
            for engine in self._engines.values()
            if engine.serves(wanted) and engine.member_id in self._failed_until_s
        ]
        return max(0.0, min(pauses)) if pauses else None

    def end_session(self, session: str) -> None:
        if (member_id := self._session_engines.pop(session, None)) is not None:
            self._num_sessions -= Counter([member_id])  # one without a session is gone from it


REFUSED_S = 0.5
"""Seconds for which others are asked than a worker that has other weights than the list said."""

BROKEN_S = 2.0
"""Seconds for which others are asked than a worker that does not answer or leaves; a dead one is off the list by then."""

LIST_S = 5.0
"""Seconds of waiting for another list until the wait is looked at again."""

GONE_S = 10.0
"""Seconds for which the pinned worker of an evaluation may be off the list or hold other weights; then the lease goes back,
because only the coordinator can pin another."""

SUSPECT_BREAKS = 2
"""Answers that broke in the middle for one turn after which its next requests run one at a time: the turn may be what ends the
workers, or it was only there."""

MAX_BREAKS = 4
"""Answers that broke in the middle after which the turn counts as the cause."""

TROUBLE_LOG_S = 60.0
OPTIONS = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", WORKER_HOST)]
"""A rollout worker has a worker's certificate, wherever it runs."""

log = logging.getLogger(__name__)


class PinLost(LeaseLost):
    """The rollout worker that is pinned for an evaluation is gone or has other weights."""


class EnginesEnd(LeaseLost):
    """Rollout workers end in the middle of this turn, again and again."""


@dataclass(frozen=True)
class Answer:
    """What a worker has sampled for a turn: everything, the beginning, or nothing."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    spans: tuple[VersionSpan, ...] = ()
    finish_reason: str = "abort"
    text: str = ""
    broken: bool = False
    """True when the worker had accepted the request and the answer was lost."""


class Engines:
    """Connections to the run's rollout workers. `update` and `LeasedTokens` run on one event loop."""

    def __init__(self, run_id: str):
        self.run_id = run_id
        self.list = EngineList()
        self._changed = asyncio.Event()
        self._channels: dict[str, Any] = {}
        self._num_calls: Counter[str] = Counter()
        """Calls that wait for their answers, by address."""
        self._closing: set[asyncio.Future[None]] = set()
        self._suspects = asyncio.Lock()
        """Held by the one turn that is asked for although it may be what ends workers."""
        self._trouble = RateLimitedLog(log, TROUBLE_LOG_S)
        self.num_broken = 0
        """Answers that broke in the middle so far: each lost at most a turn's tokens."""

    def update(self, listed: worker_pb2.Engines) -> None:
        if listed.run_id == self.run_id:
            self.list.replace(listed.engines)
            self._drop_unused({each.address for each in listed.engines})
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(None)

    async def choose(self, session: str, wanted: Wanted) -> Engine:
        """Wait for a worker that may be asked. Raises PinLost."""
        gone_s, loop = 0.0, asyncio.get_running_loop()
        while (engine := self.list.choose(session, wanted)) is None:
            began_s = loop.time()
            pause_s = self.list.seconds_until_retry(wanted)
            if not len(self.list):
                self._trouble.warning("none", "no rollout worker is there to sample turns; they wait for one")
            elif pause_s is None and wanted.pinned is None:
                self._trouble.warning(
                    "old", "no rollout worker has weights of step %d yet; turns wait", wanted.oldest_step
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LIST_S if pause_s is None else pause_s):
                    await self._changed.wait()
            gone_s += loop.time() - began_s
            if wanted.pinned is not None and pause_s is None and gone_s >= GONE_S:
                raise PinLost(f"worker {wanted.pinned_member} does not serve {tuple(wanted.pinned)} any more")
        return engine

    def one_suspect(self, is_suspect: bool) -> contextlib.AbstractAsyncContextManager[object]:
        """Return the place of the one suspect turn that is asked for at a time; for others there is room always."""
        return self._suspects if is_suspect else contextlib.nullcontext()

    async def ask(self, engine: Engine, request: rollout_pb2.GenerateRequest) -> Answer:
        """Return a worker's answer. Never raises for a fault of the worker."""
        call: Any = self._stub(engine.address).Generate(request, metadata=metadata(read_token(token_path())))
        self._num_calls[engine.address] += 1
        began = False
        try:
            began = await was_accepted(call)
            answer = _read(await call)
            if answer.finish_reason == "abort":  # the worker drains
                self.list.put_off(engine.member_id, BROKEN_S)
            return answer
        except grpc.aio.AioRpcError as error:
            return self._failed(engine, error, began and error.code() is not grpc.StatusCode.FAILED_PRECONDITION)
        except asyncio.CancelledError:
            call.cancel()
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return Answer(broken=began)  # the channel was closed under the call
        except ValueError as error:
            self._trouble.warning(engine.member_id, "an answer of %s is no turn: %s", engine.member_id, error)
            self.list.put_off(engine.member_id, BROKEN_S)
            return Answer()
        finally:
            self._num_calls[engine.address] -= 1

    def _failed(self, engine: Engine, error: grpc.aio.AioRpcError, began: bool) -> Answer:
        """Return what a failed call leaves. Raises InvalidInput when every worker would refuse the request."""
        details = error.details() or error.code().name
        match error.code():
            case grpc.StatusCode.INVALID_ARGUMENT:
                raise InvalidInput(details)
            case grpc.StatusCode.FAILED_PRECONDITION:
                self.list.put_off(engine.member_id, REFUSED_S)
            case _:
                self.list.put_off(engine.member_id, BROKEN_S)
                self._trouble.warning(
                    engine.member_id, "rollout worker %s at %s: %s", engine.member_id, engine.address, details
                )
        self.num_broken += began
        return Answer(broken=began)

    def _drop_unused(self, listed: set[str]) -> None:
        """Close the connections to workers that are off the list and owe no answer."""
        for address in [a for a in self._channels if a not in listed and not self._num_calls[a]]:
            del self._num_calls[address]
            closing = asyncio.ensure_future(self._channels.pop(address).close(None))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _stub(self, address: str) -> Any:
        if address not in self._channels:
            self._channels[address] = RenewedChannel(lambda: open_aio_channel(address, OPTIONS))
        channel: Any = self._channels[address]  # has the part of a channel that stubs use
        return rollout_pb2_grpc.RolloutServiceStub(channel)


class LeasedTokens:
    """`TokenSource` of one leased group."""

    def __init__(self, engines: Engines, wanted: Wanted, on_turn: Callable[[int], object] = lambda num_tokens: None):
        """`on_turn` gets the number of tokens of each turn."""
        self._engines, self._wanted, self._on_turn = engines, wanted, on_turn
        self._sessions: set[str] = set()

    def close(self) -> None:
        for session in self._sessions:
            self._engines.list.end_session(session)

    async def sample(self, request: TurnRequest) -> SampledTurn:
        """Return the turn. Raises InvalidInput, LeaseLost."""
        ids: list[int] = []
        logprobs: list[float] = []
        spans: list[VersionSpan] = []
        num_breaks = 0
        self._sessions.add(request.session)
        while True:
            async with self._engines.one_suspect(num_breaks >= SUSPECT_BREAKS):
                engine = await self._engines.choose(request.session, self._wanted)
                answer = await self._engines.ask(engine, self._request(request, ids))
            num_breaks += answer.broken
            if num_breaks >= MAX_BREAKS:
                raise EnginesEnd(
                    f"{num_breaks} answers to one turn of {len(request.prompt_ids)} prompt tokens broke in the middle; the last "
                    f"worker was {engine.member_id}"
                )
            for span in answer.spans:
                _append(spans, span._replace(start=span.start + len(ids), end=span.end + len(ids)))
            ids += answer.token_ids
            logprobs += answer.logprobs
            if answer.finish_reason != "abort" and ids:
                self._on_turn(len(ids))
                return SampledTurn(
                    np.array(ids, np.int32),
                    np.array(logprobs, np.float32),
                    tuple(spans),
                    answer.finish_reason,
                    answer.text,
                )

    def _request(self, request: TurnRequest, begun_ids: list[int]) -> rollout_pb2.GenerateRequest:
        message = rollout_pb2.GenerateRequest(
            prompt_ids=request.prompt_ids.tolist(),
            params=request.params.proto(),
            seed=request.seed,
            run_id=self._engines.run_id,
            session=request.session,
            begun_ids=begun_ids,
        )
        if self._wanted.pinned is not None:
            session, step = self._wanted.pinned
            message.pinned_version.CopyFrom(common_pb2.PolicyVersion(session=session, step=step))
        else:
            message.min_version.CopyFrom(common_pb2.PolicyVersion(step=self._wanted.oldest_step))
        return message


def _read(response: rollout_pb2.GenerateResponse) -> Answer:
    """Return the answer in a response. Raises ValueError for one that is none."""
    if len(response.completions) != 1:
        raise ValueError(f"it has {len(response.completions)} completions")
    completion = response.completions[0]
    number, position = len(completion.token_ids), 0
    if len(completion.logprobs) != number:
        raise ValueError(f"it has {number} tokens and {len(completion.logprobs)} log-probabilities")
    spans = []
    for span in completion.spans:
        if span.start != position or span.end <= span.start:
            raise ValueError(f"its span from {span.start} to {span.end} does not follow token {position}")
        position = span.end
        spans.append(VersionSpan(span.version.session, span.version.step, span.start, span.end))
    if position != number:
        raise ValueError(f"its spans end at {position}, its tokens at {number}")
    return Answer(
        tuple(completion.token_ids),
        tuple(completion.logprobs),
        tuple(spans),
        completion.finish_reason,
        completion.text,
    )


def _append(spans: list[VersionSpan], span: VersionSpan) -> None:
    if spans and spans[-1][:2] == span[:2] and spans[-1].end == span.start:
        spans[-1] = spans[-1]._replace(end=span.end)
    else:
        spans.append(span)

"""Samples the turns of leased groups on rollout workers.

Promise: a turn is retried until it succeeds. If a worker drains, another worker continues from its tokens; if a worker
dies, refuses or cannot be reached, its tokens are lost and another worker is tried. Only two things end a turn without
an answer: workers reject the request itself (InvalidInput), or the lease cannot continue here (`LeaseLost`).

Order of waiting: a turn waits for a listed worker with new enough weights, then for its answer, without a deadline:
gRPC's keepalive ends a silent connection, and a worker ends itself if its engine hangs (`services/rollout/run.py`). A
conversation stays with its worker, whose prefix cache has its history, as long as that worker is listed, holds new
enough weights and has not just failed. A new conversation goes to the worker with the fewest conversations.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc
import numpy as np

from paceline.calls.proof import AioProver, Credential, is_unknown, judged
from paceline.calls.token import Metadata
from paceline.environment.protocols import LeaseLost, SampledTurn, TurnRequest
from paceline.errors import InvalidInput
from paceline.groups import Version, VersionSpan, append_span
from paceline.rate_limited_log import RateLimitedLog
from paceline.services.common.access.rights import GENERATE
from paceline.services.common.serving.grpc_server import CHANNEL_OPTIONS, was_accepted
from paceline.tls.channels import TO_WORKER, RenewedChannel, open_aio_channel
from paceline.v1 import access_pb2, common_pb2, rollout_pb2, rollout_pb2_grpc, worker_pb2


class RequiredWeights(NamedTuple):
    oldest_step: int = 0
    """Step of the oldest version that may sample for the lease."""
    pinned: Version | None = None
    """The only allowed version, for an evaluation."""
    pinned_member: str = ""
    """The only allowed worker, for an evaluation."""


@dataclass(frozen=True)
class SamplingWorker:
    """A rollout worker in the coordinator's list."""

    member_id: str
    address: str
    version: Version
    ticket: access_pb2.Ticket | None = field(default=None, compare=False, repr=False)
    """Ticket for Generate; None from a coordinator without access control."""

    @property
    def place(self) -> tuple[str, str]:
        """Return the id and the address by which its connection is kept: a successor at the same address has other
        tickets."""
        return self.member_id, self.address

    def serves(self, required: RequiredWeights) -> bool:
        """Return whether the worker may be tried, according to the list."""
        if required.pinned is not None:
            return self.member_id == required.pinned_member and self.version == required.pinned
        return self.version.step >= required.oldest_step


class WorkerList:
    """Holds the coordinator's newest list of rollout workers, and the worker of each conversation."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._workers: dict[str, SamplingWorker] = {}
        self._conversation_workers: dict[str, str] = {}
        self._num_conversations: Counter[str] = Counter()
        self._failed_until_s: dict[str, float] = {}
        self.num_moved = 0

    def __len__(self) -> int:
        return len(self._workers)

    def replace(self, addresses: Iterable[worker_pb2.EngineAddress]) -> None:
        """Replace the list. Workers on both lists keep their conversations."""
        self._workers = {
            each.member_id: SamplingWorker(
                each.member_id,
                each.address,
                Version(each.version.session, each.version.step),
                each.ticket if each.HasField("ticket") else None,
            )
            for each in addresses
            if each.address
        }
        failed = self._failed_until_s.items()
        self._failed_until_s = {name: until_s for name, until_s in failed if name in self._workers}

    def put_off(self, member_id: str, seconds: float) -> None:
        """Exclude this worker for `seconds`, because it has just failed or refused."""
        self._failed_until_s[member_id] = self._clock() + seconds

    def choose(self, conversation: str, required: RequiredWeights) -> SamplingWorker | None:
        """Return the worker for the next turn of a conversation; None if there is none."""
        now_s = self._clock()
        eligible = [
            worker
            for worker in self._workers.values()
            if worker.serves(required) and self._failed_until_s.get(worker.member_id, now_s) <= now_s
        ]
        if not eligible:
            return None
        before = self._conversation_workers.get(conversation)
        chosen = next((worker for worker in eligible if worker.member_id == before), None)
        if chosen is None:
            chosen = min(eligible, key=lambda worker: (self._num_conversations[worker.member_id], worker.member_id))
            self.num_moved += before is not None
            self.end_conversation(conversation)
            self._conversation_workers[conversation] = chosen.member_id
            self._num_conversations[chosen.member_id] += 1
        return chosen

    def seconds_until_retry(self, required: RequiredWeights) -> float | None:
        """Return the seconds until a worker may be retried; None if only a new list can help."""
        now_s = self._clock()
        pauses = [
            self._failed_until_s[worker.member_id] - now_s
            for worker in self._workers.values()
            if worker.serves(required) and worker.member_id in self._failed_until_s
        ]
        return max(0.0, min(pauses)) if pauses else None

    def end_conversation(self, conversation: str) -> None:
        if (member_id := self._conversation_workers.pop(conversation, None)) is not None:
            self._num_conversations -= Counter([member_id])  # drops the entry at 0


class Pauses(NamedTuple):
    """Durations of waits, in seconds."""

    refused_s: float = 0.5
    """Back-off for a worker that has other weights than the list says."""
    broken_s: float = 2.0
    """Back-off for a worker that does not answer or leaves; a dead one is off the list by then."""
    list_s: float = 5.0
    """Longest wait for a new list before the state is checked again."""
    gone_s: float = 10.0
    """Longest time that the pinned worker of an evaluation may be off the list or hold other weights. Then the lease is
    returned, because only the coordinator can pin another worker."""


PAUSES = Pauses()
SUSPECT_BREAKS = 2
"""Number of broken answers after which their turn may be the cause; only one such turn is sampled at a time."""

MAX_BREAKS = 4
"""If this many answers of a turn were broken, the turn counts as the reason why workers ended."""

TROUBLE_LOG_S = 60.0
OPTIONS = [*CHANNEL_OPTIONS, *TO_WORKER]

log = logging.getLogger(__name__)


class PinLost(LeaseLost):
    """The rollout worker that is pinned for an evaluation has left or has other weights."""


class WorkersEnd(LeaseLost):
    """Rollout workers keep ending during this turn."""


@dataclass(frozen=True)
class Answer:
    """The part of a turn that a worker has sampled: all, a beginning, or nothing."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    spans: tuple[VersionSpan, ...] = ()
    finish_reason: str = "abort"
    text: str = ""
    broken: bool = False
    """True if the worker had accepted the request and the answer was lost."""


class SamplingWorkers:
    """Holds the connections to the run's rollout workers. `update` and `LeasedTokens` run on one event loop."""

    def __init__(self, run_id: str, pauses: Pauses = PAUSES):
        self.run_id, self._pauses = run_id, pauses
        self.list = WorkerList()
        self._changed = asyncio.Event()
        self._channels: dict[tuple[str, str], Any] = {}
        self._tickets: dict[tuple[str, str], access_pb2.Ticket | None] = {}
        """The newest tickets."""
        self._provers: dict[tuple[str, str], AioProver] = {}
        self._num_calls: Counter[tuple[str, str]] = Counter()
        self._closing: set[asyncio.Future[None]] = set()
        self._suspects = asyncio.Lock()
        """Lock that is held while a turn is sampled that may be the reason why workers ended."""
        self._trouble = RateLimitedLog(log, TROUBLE_LOG_S)
        self.num_broken = 0
        """Number of broken answers; a broken answer loses at most the tokens of one turn."""

    def update(self, listed: worker_pb2.Engines) -> None:
        if listed.run_id == self.run_id:
            self.list.replace(listed.engines)
            self._drop_unused({(each.member_id, each.address) for each in listed.engines})
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(None)

    async def choose(self, conversation: str, required: RequiredWeights) -> SamplingWorker:
        """Wait for a worker that may be tried. Raises PinLost."""
        gone_s, loop = 0.0, asyncio.get_running_loop()
        while (worker := self.list.choose(conversation, required)) is None:
            began_s = loop.time()
            pause_s = self.list.seconds_until_retry(required)
            if not len(self.list):
                self._trouble.warning("none", "no rollout worker can sample turns yet; turns wait")
            elif pause_s is None and required.pinned is None:
                self._trouble.warning(
                    "old", "no rollout worker has weights of step %d yet; turns wait", required.oldest_step
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pauses.list_s if pause_s is None else pause_s):
                    await self._changed.wait()
            gone_s += loop.time() - began_s
            if required.pinned is not None and pause_s is None and gone_s >= self._pauses.gone_s:
                raise PinLost(
                    f"worker {required.pinned_member} does not serve version {tuple(required.pinned)} any more"
                )
        return worker

    def limit_suspects(self, is_suspect: bool) -> contextlib.AbstractAsyncContextManager[object]:
        """Return a context that allows one suspect turn at a time and any number of other turns."""
        return self._suspects if is_suspect else contextlib.nullcontext()

    async def ask(self, worker: SamplingWorker, request: rollout_pb2.GenerateRequest) -> Answer:
        """Return a worker's answer. A fault of the worker raises no error."""
        place = worker.place
        self._num_calls[place] += 1
        call: Any = None
        began = False
        try:
            stub, prover = self._connection(worker)
            signed = await prover.sign(GENERATE)
            call = stub.Generate(request, metadata=signed.metadata)
            began = await was_accepted(call)
            answer = _read(await call)
            if signed.answer and not signed.is_proven(await call.trailing_metadata()):
                raise ValueError("its answer has no proof")
            if answer.finish_reason == "abort":  # the worker drains
                self.list.put_off(worker.member_id, self._pauses.broken_s)
            return answer
        except grpc.aio.AioRpcError as error:
            if is_unknown(error):  # the worker has a new key; the next attempt begins a new session
                if call is not None:
                    prover.drop(signed)
                self.list.put_off(worker.member_id, self._pauses.refused_s)
                return Answer()
            if call is not None:
                error = judged(worker.address, signed, error)
            return self._failed(worker, error, began and error.code() is not grpc.StatusCode.FAILED_PRECONDITION)
        except asyncio.CancelledError:
            if call is not None:
                call.cancel()
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return Answer(broken=began)  # the channel was closed during the call
        except ValueError as error:
            self._trouble.warning(
                worker.member_id, "rollout worker %s sent an invalid answer: %s", worker.member_id, error
            )
            self.list.put_off(worker.member_id, self._pauses.broken_s)
            return Answer()
        finally:
            self._num_calls[place] -= 1

    def _failed(self, worker: SamplingWorker, error: grpc.aio.AioRpcError, began: bool) -> Answer:
        """Return the answer of a failed call. Raises InvalidInput if every worker would reject the request."""
        details = error.details() or error.code().name
        match error.code():
            case grpc.StatusCode.INVALID_ARGUMENT:
                raise InvalidInput(details)
            case grpc.StatusCode.FAILED_PRECONDITION:
                self.list.put_off(worker.member_id, self._pauses.refused_s)
            case _:
                self.list.put_off(worker.member_id, self._pauses.broken_s)
                self._trouble.warning(
                    worker.member_id, "rollout worker %s at %s: %s", worker.member_id, worker.address, details
                )
        self.num_broken += began
        return Answer(broken=began)

    def _drop_unused(self, listed: set[tuple[str, str]]) -> None:
        for place in [each for each in self._channels if each not in listed and not self._num_calls[each]]:
            del self._num_calls[place]
            self._provers.pop(place, None)
            self._tickets.pop(place, None)
            closing = asyncio.ensure_future(self._channels.pop(place).close(None))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _connection(self, worker: SamplingWorker) -> tuple[Any, AioProver]:
        place, address = worker.place, worker.address
        if place not in self._channels:
            self._channels[place] = RenewedChannel(lambda: open_aio_channel(address, OPTIONS))
            self._provers[place] = AioProver(self._channels[place], address, lambda: self._known(place))
        self._tickets[place] = worker.ticket
        channel: Any = self._channels[place]  # has the methods of a channel that stubs use
        return rollout_pb2_grpc.RolloutServiceStub(channel), self._provers[place]

    def _known(self, place: tuple[str, str]) -> Credential | Metadata:
        """Return the proof for a call of a worker: its ticket, never a token."""
        ticket = self._tickets[place]
        return Credential.of_ticket(ticket) if ticket is not None else ()


class LeasedTokens:
    """`TokenSource` of one leased group."""

    def __init__(
        self,
        workers: SamplingWorkers,
        required: RequiredWeights,
        on_turn: Callable[[int], object] = lambda num_tokens: None,
    ):
        """`on_turn` is called with the number of tokens of each turn."""
        self._workers, self._required, self._on_turn = workers, required, on_turn
        self._conversations: set[str] = set()

    def close(self) -> None:
        for conversation in self._conversations:
            self._workers.list.end_conversation(conversation)

    async def sample(self, request: TurnRequest) -> SampledTurn:
        """Return the turn. Raises InvalidInput, LeaseLost."""
        ids: list[int] = []
        logprobs: list[float] = []
        spans: list[VersionSpan] = []
        num_breaks = 0
        self._conversations.add(request.conversation)
        while True:
            async with self._workers.limit_suspects(num_breaks >= SUSPECT_BREAKS):
                worker = await self._workers.choose(request.conversation, self._required)
                answer = await self._workers.ask(worker, self._request(request, ids))
            num_breaks += answer.broken
            if num_breaks >= MAX_BREAKS:
                raise WorkersEnd(
                    f"{num_breaks} answers to one turn of {len(request.prompt_ids)} prompt tokens broke; the last "
                    f"worker was {worker.member_id}"
                )
            for span in answer.spans:
                start, end = span.start + len(ids), span.end + len(ids)
                append_span(spans, span._replace(start=start, end=end, sampler=worker.member_id))
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
            run_id=self._workers.run_id,
            session=request.conversation,
            begun_ids=begun_ids,
        )
        if self._required.pinned is not None:
            session, step = self._required.pinned
            message.pinned_version.CopyFrom(common_pb2.PolicyVersion(session=session, step=step))
        else:
            message.min_version.CopyFrom(common_pb2.PolicyVersion(step=self._required.oldest_step))
        return message


def _read(response: rollout_pb2.GenerateResponse) -> Answer:
    if len(response.completions) != 1:
        raise ValueError(f"the answer has {len(response.completions)} completions, not 1")
    completion = response.completions[0]
    number, position = len(completion.token_ids), 0
    if len(completion.logprobs) != number:
        raise ValueError(f"the answer has {number} tokens, but {len(completion.logprobs)} log-probabilities")
    spans = []
    for span in completion.spans:
        if span.start != position or span.end <= span.start:
            raise ValueError(f"the answer's span from {span.start} to {span.end} does not follow token {position}")
        position = span.end
        spans.append(VersionSpan(span.version.session, span.version.step, span.start, span.end))
    if position != number:
        raise ValueError(f"the answer's spans end at {position}, but its tokens at {number}")
    return Answer(
        tuple(completion.token_ids), tuple(completion.logprobs), tuple(spans), completion.finish_reason, completion.text
    )

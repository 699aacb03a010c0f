"""The native engine: continuous batching over a Hugging Face model, on a separate thread, for any machine.

Promise: that of `paceline.rollout.engine.Engine`; besides, asyncio never waits for a forward pass. Only the thread uses
model and batch; callers append to the inbox (`_waiting`, `_aborted`, `_updates`, `_scorings`) under `_wake`, and get
their answers through futures on their loops. In each turn the thread empties the inbox, aborts requests, changes
weights, lets requests join, scores some given texts, and decodes one token for every sequence. So aborts and new
weights wait for one decode step, and new requests for free slots. When an error ends the thread, all waiting and later
callers get its reason. A given text's log-probabilities are those that it would get alone. Axis suffixes: R texts of a
pass, T tokens of the longest.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import EngineDied, InvalidInput, Unavailable
from paceline.groups import Completion, IntArray, Version
from paceline.rollout.engine import GenerationRequest, PromptLogprobs, check_scored_ids, empty_completion
from paceline.rollout.native.batch import DecodeBatch, Ended, RunningSequence
from paceline.rollout.native.model import NativeModel, load_native_model
from paceline.spec import RunSpec
from paceline.weights.hosts.host_weights import HostWeights

log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 60.0
"""Seconds for which `close` waits for the decode step in progress."""


@dataclass(eq=False)
class _Update:
    version: Version
    weights: Mapping[str, Tensor]
    answer: asyncio.Future[float]


class NativeEngine:
    """See `paceline.rollout.engine.Engine`. `device` is a torch device; `load_weights` as in `create_engine`."""

    def __init__(self, spec: RunSpec, *, device: str = "cpu", load_weights: bool = False) -> None:
        self._model = load_native_model(spec.policy, device, load_weights)
        self.max_batch_size = spec.policy.generation.batch_size(on_gpu=device.startswith("cuda"))
        self.version: Version | None = None
        self._batch = DecodeBatch(self._model, self.max_batch_size)
        self._in_flight = spec.async_grpo.in_flight_weight_updates
        self._recompute_after = spec.async_grpo.recompute_after_updates
        if load_weights:
            self.version = Version(0, 0)
            self._batch.change_version(self.version, None)

        self._wake = threading.Condition()
        self._answers: dict[RunningSequence, asyncio.Future[Completion]] = {}
        self._by_id: dict[str, RunningSequence] = {}
        self._waiting: deque[RunningSequence] = deque()
        self._aborted: list[RunningSequence] = []
        self._updates: deque[_Update] = deque()
        self._scorings: deque[Scoring] = deque()
        self._closing = False
        self._error: BaseException | None = None
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="native-engine", daemon=True)
        self._thread.start()

    @property
    def num_running(self) -> int:
        return len(self._batch.sequences)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def capacity(self) -> int:
        return self.max_batch_size

    @property
    def prefix_hits(self) -> int:
        return self._batch.prefix_hits

    async def ready(self) -> None:
        """Return at once; see `Engine.ready`."""

    async def watch(self) -> None:
        await asyncio.shield(asyncio.wrap_future(self._ended))

    async def generate(self, request: GenerationRequest) -> Completion:
        sequence = self._sequence_of(request)
        num_prefix = 0 if request.prefix is None else len(request.prefix.token_ids)
        if sequence.prompt_length + num_prefix >= sequence.limit and request.prefix is not None:
            prefix = request.prefix
            return Completion(prefix.token_ids, prefix.logprobs, prefix.spans, "length")
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        with self._wake:
            self._refuse_if_unready()
            if request.request_id in self._by_id:
                raise InvalidInput(f"request_id {request.request_id!r} is in use; give every request a separate one")
            self._by_id[request.request_id] = sequence
            self._answers[sequence] = answer
            self._waiting.append(sequence)
            self._wake.notify()
        try:
            return await answer
        except asyncio.CancelledError:
            self._abort(sequence)
            raise

    async def prompt_logprobs(self, token_ids: IntArray) -> PromptLogprobs:
        """See `Engine.prompt_logprobs`. Waiting texts are scored together; between two passes the batch decodes."""
        check_scored_ids(token_ids, self._model.max_tokens, self._model.vocab_size)
        answer: asyncio.Future[PromptLogprobs] = asyncio.get_running_loop().create_future()
        with self._wake:
            self._refuse_if_unready()
            self._scorings.append(Scoring(np.asarray(token_ids, np.int32), answer))
            self._wake.notify()
        return await answer

    def abort(self, request_id: str) -> None:
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._abort(sequence)

    async def update_weights(self, version: Version, weights: Mapping[str, Tensor]) -> float:
        """See `Engine.update_weights`. The pause is the copy and the recomputation of keys and values. Without
        in-flight updates running sequences are first decoded to their end, which is not part of the pause."""
        if isinstance(weights, HostWeights):
            await asyncio.to_thread(self._prepare, weights)
        await asyncio.to_thread(self._model.check, weights)
        answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        with self._wake:
            self._refuse_if_ended()
            self._updates.append(_Update(version, weights, answer))
            self._wake.notify()
        return await answer

    def _prepare(self, weights: HostWeights) -> None:
        weights.verify()
        if self._model.device.type == "cuda":
            weights.segment.page_lock()

    async def close(self) -> None:
        """See `Engine.close`. Raises Unavailable if the step in progress does not end."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise Unavailable(f"the engine's decode step has not ended after {CLOSE_TIMEOUT_S} s")

    def _sequence_of(self, request: GenerationRequest) -> RunningSequence:
        """Return the sequence of a request, after checks for everything that could fail later. Raises InvalidInput."""
        limit = request.limit(self._model.max_tokens, self._model.vocab_size)
        stop_ids = frozenset((*self._model.stop_token_ids, *request.params.stop_token_ids))
        return RunningSequence(request, stop_ids, limit, list(request.prefix.spans) if request.prefix else [])

    def _abort(self, sequence: RunningSequence) -> None:
        with self._wake:
            if sequence in self._answers:
                self._aborted.append(sequence)
                # The id is free at once, because a cancelled request may be submitted again under it.
                self._by_id.pop(sequence.request.request_id, None)
                self._wake.notify()

    def _refuse_if_unready(self) -> None:
        self._refuse_if_ended()
        if self.version is None:
            raise Unavailable("the engine has no weights yet; call update_weights first")

    def _refuse_if_ended(self) -> None:
        if self._error is not None:
            raise _died(self._error)
        if self._closing:
            raise Unavailable("the engine is closed")

    # Everything below runs on the engine's thread.

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
        except BaseException as error:
            log.exception("the native engine died")
            self._end(error)
        else:
            self._end(None)

    def _turn(self) -> bool:
        """Make one round of the loop; return False when the engine is closed."""
        batch = self._batch
        with self._wake:
            # No deadline: an idle engine waits for its callers, and close() is one of them.
            self._wake.wait_for(
                lambda: (
                    (batch.sequences or self._closing)
                    or any((self._waiting, self._aborted, self._updates, self._scorings))
                )
            )
            if self._closing:
                return False
            aborted, self._aborted = list(dict.fromkeys(self._aborted)), []
            never_ran = [sequence for sequence in aborted if sequence in self._waiting]
            for sequence in never_ran:
                self._waiting.remove(sequence)
        self._answer([_unstarted(sequence) for sequence in never_ran])
        self._answer(batch.remove([sequence for sequence in aborted if sequence in batch.sequences]))
        if self._updates and (self._in_flight or not batch.sequences):
            self._apply(self._updates[0])
            self._updates.popleft()
        if self._waiting and not self._updates:
            self._answer(batch.add(self._joining()))
        if self._scorings:
            assert self.version is not None
            _resolve(score_next(self._scorings, self._model, self.version))
        if batch.sequences:
            self._answer(batch.step())
            self._tell_progress()
        return True

    def _joining(self) -> list[RunningSequence]:
        """Return the requests that join now: all of them as soon as they fit; otherwise some of them once an eighth of
        the batch is free, because a prefill pass for each free slot would cost as much as a decode step of the
        batch."""
        free = self._batch.num_free
        with self._wake:
            if free < min(len(self._waiting), max(1, self.max_batch_size // 8)):
                return []
            return [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]

    def _apply(self, update: _Update) -> None:
        start = time.perf_counter()
        self._model.replace(update.weights)
        self._batch.change_version(update.version, self._recompute_after)
        self._model.synchronize()
        self.version = update.version
        _resolve([(update.answer, time.perf_counter() - start)])

    def _answer(self, ended: Iterable[Ended]) -> None:
        answers: list[tuple[asyncio.Future[Any], Any]] = []
        with self._wake:
            for sequence, completion in ended:
                if self._by_id.get(sequence.request.request_id) is sequence:
                    del self._by_id[sequence.request.request_id]
                broken = not np.isfinite(completion.logprobs).all()
                value = _not_finite(sequence, self.version) if broken else completion
                answers.append((self._answers.pop(sequence), value))
        _resolve(answers)

    def _tell_progress(self) -> None:
        for sequence, completion in self._batch.watched():
            with self._wake:
                loop = self._answers[sequence].get_loop()
            assert sequence.request.on_progress is not None
            with contextlib.suppress(RuntimeError):  # a closed loop: no caller waits any more
                loop.call_soon_threadsafe(sequence.request.on_progress, completion)

    def _end(self, error: BaseException | None) -> None:
        """Answer all waiting callers: after `close` with their present completions, after an error with its reason."""
        with self._wake:
            self._error, self._closing = error, True
            waiting, self._waiting = list(self._waiting), deque()
            updates, self._updates = list(self._updates), deque()
            scorings, self._scorings = list(self._scorings), deque()
        left: list[asyncio.Future[Any]] = [*(u.answer for u in updates), *(s.answer for s in scorings)]
        if error is None:
            with torch.inference_mode():
                self._answer(self._batch.remove(list(self._batch.sequences)))
            self._answer([_unstarted(sequence) for sequence in waiting])
            _resolve([(answer, Unavailable("the engine was closed")) for answer in left])
            self._ended.set_result(None)
            return
        futures = [*self._answers.values(), *left]
        self._answers.clear()
        self._by_id.clear()
        _resolve([(future, _died(error)) for future in futures])
        self._ended.set_exception(_died(error))


def _died(error: BaseException) -> EngineDied:
    died = EngineDied(f"the native engine died: {error!r}")
    died.__cause__ = error
    return died


def _not_finite(sequence: RunningSequence, version: Version | None) -> Unavailable:
    return Unavailable(
        f"request {sequence.request.request_id!r}: the model's logits under {version} are not finite; "
        "newer weights or policy.generation_precision=float32 may help"
    )


def _unstarted(sequence: RunningSequence) -> Ended:
    return sequence, sequence.request.prefix or empty_completion()


def _resolve(answers: list[tuple[asyncio.Future[Any], Any]]) -> None:
    """Set results (or exceptions) of futures from another thread; each loop is woken once for all its futures."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = defaultdict(list)
    for future, value in answers:
        by_loop[future.get_loop()].append((future, value))
    for loop, items in by_loop.items():
        try:
            loop.call_soon_threadsafe(_set_all, items)
        except RuntimeError:
            # The loop was closed, so no caller waits any more.
            log.debug("%d answers were dropped, because the event loop that waits for them is closed", len(items))


def _set_all(items: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, value in items:
        if future.done():
            continue
        if isinstance(value, BaseException):
            future.set_exception(value)
        else:
            future.set_result(value)


PASS_TOKENS = 8192
"""Most padded tokens in one pass, which bounds its activations; a single longer text has its own pass."""


@dataclass(eq=False)
class Scoring:
    """A text that waits for its log-probabilities."""

    token_ids: IntArray
    answer: asyncio.Future[PromptLogprobs]


def score_next(waiting: deque[Scoring], model: NativeModel, version: Version) -> list[tuple[asyncio.Future[Any], Any]]:
    """Take the oldest texts that fit one pass from `waiting`; return their answers. One thread calls it."""
    taken: list[Scoring] = []
    longest = 0
    while waiting and (not taken or max(longest, len(waiting[0].token_ids)) * (len(taken) + 1) <= PASS_TOKENS):
        text = waiting.popleft()
        if not text.answer.done():  # a caller that no longer waits has cancelled its future
            taken.append(text)
            longest = max(longest, len(text.token_ids))
    if not taken:
        return []
    ids_RT = np.zeros((len(taken), longest), np.int64)
    for row, text in zip(ids_RT, taken, strict=True):
        row[: len(text.token_ids)] = text.token_ids
    device = model.device
    scored = model.score(torch.from_numpy(ids_RT).to(device))
    rows = zip(*(tensor.cpu().numpy() for tensor in scored), strict=True)
    return [
        (text.answer, _answer([values_T[: len(text.token_ids)] for values_T in row], version))
        for text, row in zip(taken, rows, strict=True)
    ]


def _answer(row: list[Any], version: Version) -> PromptLogprobs | Unavailable:
    """Return the answer from a text's [P] log-probabilities, likeliest tokens and their log-probabilities."""
    logprobs_T, top_ids_T, tops_T = row
    if not np.isfinite(logprobs_T[1:]).all():
        return Unavailable(
            f"the model's logits under {tuple(version)} are not finite for a given text; newer weights or "
            "policy.generation_precision=float32 may help"
        )
    logprobs, top_ids, tops = logprobs_T.copy(), top_ids_T.astype(np.int32), tops_T.copy()
    logprobs[0] = tops[0] = np.nan
    top_ids[0] = -1
    return PromptLogprobs(logprobs, top_ids, tops, version)

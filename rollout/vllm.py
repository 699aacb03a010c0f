"""The vLLM engine: vLLM's AsyncLLM behind the engine protocol, with our weights and without processes left behind.

Who owns what: a thread of its own runs the asyncio loop on which AsyncLLM lives, so that neither its start nor its
bookkeeping for hundreds of sequences holds up the service. Callers wait for futures. Everything below the line is that
loop's alone. vLLM's own processes (the engine core, a worker for each part of the model) are watched by a guard
(`process_guard`): they end with this process however it ends.

Every request is one completion; siblings are submitted one after the other, so vLLM's prefix cache computes their
prompt once. Versions of tokens are those that vLLM reports itself.

An update of the weights: checked, put into shared memory, read and verified by every worker, all while generation goes
on. Then generation pauses, the workers load, the cache is cleared, and it resumes. A failure before the pause leaves the
old weights serving; one in between ends the engine, since nobody could say which weights it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import threading
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from torch import Tensor

from paceline.errors import EngineDied, InvalidInput, PacelineError, Unavailable
from paceline.groups import Completion, Version, VersionSpan
from paceline.spec import RunSpec
from rollout.engine import GenerationRequest, check_prefix, empty_completion
from rollout.feeding import Feeding, StepReport
from rollout.model_layout import end_token_ids, meta_layout, read_config
from rollout.process_guard import ProcessGuard
from rollout.shared_weights import SharedWeights
from rollout.vllm_arguments import engine_arguments, engine_config, replicas

if TYPE_CHECKING:
    from rollout.vllm_reports import Reports

ResultT = TypeVar("ResultT")
READ_TIMEOUT_S = 300.0
"""How long the workers may take to read and verify new weights, while they go on decoding."""
WATCH_S = 0.2
"""Seconds between two looks at whether the engine lives: vLLM tells nobody who does not ask."""
RESUME_TIMEOUT_S = 60.0
"""How long `update_weights` waits for the first token after it, which only measures the pause."""
log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Sequence:
    request: GenerationRequest
    name: str
    """Its name within vLLM: unique over the engine's life, so a request's own name is free as soon as it has ended."""
    limit: int
    """Most tokens of prompt and completion together."""
    loop: asyncio.AbstractEventLoop
    """The caller's."""
    aborted: bool = False
    submitted: bool = False


class VllmEngine:
    """See `rollout.engine.Engine`. `device` is cpu or cuda; `load_weights` as in `create_engine`."""

    def __init__(self, spec: RunSpec, *, device: str = "cpu", load_weights: bool = False) -> None:
        """Returns at once; the engine starts meanwhile, and `ready` waits for it. Raises InvalidInput: vLLM or the
        model's config cannot be used.
        """
        config = read_config(spec.policy)
        self._layout = meta_layout(config)
        self._arguments = engine_arguments(spec, config, self._layout.architecture, device, load_weights)
        self._max_tokens: int = self._arguments["max_model_len"]
        self._end_ids = end_token_ids(spec.policy, config, _generation_config(spec.policy.model_name))
        self._num_readers = replicas(spec.policy)
        self._in_flight = spec.async_grpo.in_flight_weight_updates
        self._recompute = spec.async_grpo.recompute_kv_cache_after_weight_updates
        self.max_batch_size: int = self._arguments["max_num_seqs"]
        self.version: Version | None = None
        self.closed = False
        self._first = Version(0, 0) if load_weights else None
        self._guard = ProcessGuard()
        try:
            self._config = engine_config(self._arguments, self._guard, device)
        except BaseException:
            self._guard.close()
            raise
        self._live: dict[str, _Sequence] = {}
        self._numbers = itertools.count()
        self._closing = False
        self._error: BaseException | None = None
        self._llm: Any = None
        self._reports: list[Reports] = []
        self._feeding = Feeding(sure=1, most=self.max_batch_size)
        self._updating = asyncio.Lock()
        self._gate = threading.Lock()
        self._over = False
        self._loop = asyncio.new_event_loop()
        self._started: Future[None] = Future()
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)
        self._thread.start()

    @property
    def num_running(self) -> int:
        """Sequences in the batch, as of the last step."""
        return min(sum(report.latest.running for report in self._reports), len(self._live))

    @property
    def num_waiting(self) -> int:
        """Requests that are not in the batch yet."""
        return len(self._live) - self.num_running

    @property
    def capacity(self) -> int:
        """See `Engine.capacity`."""
        return self._feeding.limit

    async def ready(self) -> None:
        """See `Engine.ready`."""
        await asyncio.shield(asyncio.wrap_future(self._started))

    async def watch(self) -> None:
        """See `Engine.watch`."""
        await asyncio.shield(asyncio.wrap_future(self._ended))

    async def generate(self, request: GenerationRequest) -> Completion:
        """See `Engine.generate`."""
        limit = self._admit(request)
        prefix = request.prefix
        if prefix is not None and len(request.prompt_ids) + len(prefix.token_ids) >= limit:
            return Completion(prefix.token_ids, prefix.logprobs, prefix.spans, "length")
        self._refuse_if_ended()
        if self.version is None:
            raise Unavailable("the engine has no weights yet; call update_weights first")
        if request.request_id in self._live:
            raise InvalidInput(f"request_id {request.request_id!r} is in use; give every request its own")
        name = f"{request.request_id}#{next(self._numbers)}"
        sequence = _Sequence(request, name, limit, asyncio.get_running_loop())
        self._live[request.request_id] = sequence
        try:
            return await self._answer(asyncio.wrap_future(self._submit(self._sample(sequence))))
        finally:
            if self._live.get(request.request_id) is sequence:
                del self._live[request.request_id]

    def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        sequence = self._live.get(request_id)
        with self._gate:
            if sequence is not None and not self._over:
                self._loop.call_soon_threadsafe(self._abort, sequence)

    async def update_weights(self, version: Version, weights: Mapping[str, Tensor]) -> float:
        """See `Engine.update_weights`. The pause ends with the first token after it, so recomputing keys and values
        counts; without in-flight updates running sequences are decoded to their end first, which does not count.
        """
        await asyncio.to_thread(self._layout.check, weights)
        await self.ready()
        self._refuse_if_ended()
        update = asyncio.wrap_future(self._submit(self._update(version, weights)))
        return await self._answer(asyncio.shield(update))

    @property
    def prefix_hits(self) -> int:
        """Prompt tokens that were not computed, since the prefix cache had them."""
        return sum(report.prefix_hits for report in self._reports)

    async def close(self) -> None:
        """See `Engine.close`."""
        self._closing = self.closed = True
        while not self._started.done():
            # Nothing else interrupts a start; it may have more processes to come.
            await asyncio.to_thread(self._guard.kill)
            await asyncio.wait([asyncio.wrap_future(self._started)], timeout=WATCH_S)
        await asyncio.to_thread(self._thread.join)

    def _admit(self, request: GenerationRequest) -> int:
        """Checks everything about a request that could later hurt the engine; returns its limit. Raises InvalidInput."""
        num_prompt = len(request.prompt_ids)
        known = request.prompt_ids
        if request.prefix is not None:
            check_prefix(request.prefix)
            known = np.concatenate([known, request.prefix.token_ids])
        if not 0 < num_prompt < self._max_tokens:
            raise InvalidInput(
                f"the prompt has {num_prompt} tokens, must have 1 to {self._max_tokens - 1}: "
                "policy.max_total_sequence_length (or the model) bounds prompt and completion together"
            )
        if known.min() < 0 or known.max() >= self._layout.vocab_size:
            raise InvalidInput(
                f"prompt and prefix have token ids from {known.min()} to {known.max()}, the model knows 0 to "
                f"{self._layout.vocab_size - 1}; is it the model's own tokenizer?"
            )
        return min(num_prompt + request.params.max_new_tokens, self._max_tokens)

    def _submit(self, work: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """Runs `work` on the engine's loop. Raises what `_refuse_if_ended` raises, also when the loop has just ended."""
        with self._gate:
            if not self._over:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        self._refuse_if_ended()
        raise Unavailable("the engine is closed")

    async def _answer(self, future: asyncio.Future[ResultT]) -> ResultT:
        """The future's result; its cancellation by the engine's end becomes the reason of that end."""
        try:
            return await future
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._over and not (task and task.cancelling()):
                self._refuse_if_ended()
            raise

    def _refuse_if_ended(self) -> None:
        if self._error is not None:
            raise _died(self._error)
        if self._closing:
            raise Unavailable("the engine is closed")

    # Everything below runs on the engine's thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._live_once())
        except BaseException as error:
            if not self._closing:
                log.exception("the vLLM engine died")
                self._error = error
        self._guard.close()
        outcome = None if self._error is None else _died(self._error)
        with self._gate:
            self._over = True
        for round_ in range(2):  # what was submitted last becomes a task first, and is cancelled then
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0.01 * round_))
        self._loop.close()
        for future in (self._started, self._ended):
            if not future.done():
                if outcome is None and future is self._started:
                    future.set_exception(Unavailable("the engine was closed while it started"))
                elif outcome is None:
                    future.set_result(None)
                else:
                    future.set_exception(outcome)

    async def _live_once(self) -> None:
        """Starts AsyncLLM and watches it until `close`. Raises whatever it died of."""
        from vllm.v1.engine.async_llm import AsyncLLM

        from rollout.vllm_reports import Reports

        def reports(vllm_config: Any, engine_index: int = 0) -> Reports:
            self._reports.append(Reports(self._on_step, vllm_config, engine_index))
            return self._reports[-1]

        self._llm = AsyncLLM.from_vllm_config(self._config, stat_loggers=[reports], disable_log_stats=True)
        try:
            kv_tokens = sum(report.kv_tokens for report in self._reports)
            self._feeding = Feeding(sure=kv_tokens // self._max_tokens, most=self.max_batch_size)
            if self._first is not None:
                await self._llm.update_weight_version(_label(self._first))
                self.version = self._first
            self._guard.started()
            log.info("vLLM is up: room for %d tokens, %d sequences", kv_tokens, self.max_batch_size)
            self._started.set_result(None)
            while not self._closing:
                if self._llm.errored:
                    raise self._llm.dead_error
                if self._error is not None:
                    raise self._error
                await asyncio.sleep(WATCH_S)
            for sequence in list(self._live.values()):
                self._abort(sequence)
            while self._live and not self._llm.errored:  # noqa: ASYNC110 - each is on its way to its caller
                await asyncio.sleep(0.005)
        finally:
            self._llm.shutdown(5.0)

    async def _sample(self, sequence: _Sequence) -> Completion:
        request = sequence.request
        if sequence.aborted:
            return request.prefix or empty_completion()
        known = request.prompt_ids.tolist()
        if request.prefix is not None:
            known += request.prefix.token_ids.tolist()
        queue = None
        finished = False
        try:
            queue = await self._llm.add_request(
                sequence.name, {"prompt_token_ids": known}, self._params(sequence, len(known))
            )
            sequence.submitted = True
            if sequence.aborted:
                await self._llm.abort(sequence.name)
            while not finished:
                output = queue.get_nowait() or await queue.get()
                finished = output.finished
                if not finished:
                    self._tell_progress(sequence, output.outputs[0])
            return self._completion(sequence, output.outputs[0])
        except (asyncio.CancelledError, PacelineError):
            raise
        except Exception as error:
            if self._llm.errored:
                raise _died(error) from error
            raise Unavailable(f"vLLM refused request {request.request_id!r}: {error}") from error
        finally:
            if queue is not None and not finished and not self._llm.errored:
                await self._llm.abort(sequence.name)

    def _params(self, sequence: _Sequence, num_known: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        request, params = sequence.request, sequence.request.params
        done = num_known - len(request.prompt_ids)
        watched = request.on_progress is not None
        sampling = SamplingParams(
            n=1,
            max_tokens=sequence.limit - num_known,
            min_tokens=min(max(0, params.min_new_tokens - done), sequence.limit - num_known),
            top_p=params.top_p,
            top_k=params.top_k,
            seed=_seed(request.seed, done),
            stop_token_ids=[
                token
                for token in sorted({*self._end_ids, *params.stop_token_ids})
                if token < self._layout.vocab_size
            ],
            ignore_eos=True,  # the ends of sequence are among the stop tokens
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE if watched else RequestOutputKind.FINAL_ONLY,
        )
        # Afterwards, since the constructor would raise what is below 0.01 to it, and the log-probabilities with it.
        sampling.temperature = params.temperature
        return sampling

    def _tell_progress(self, sequence: _Sequence, output: Any) -> None:
        tell = sequence.request.on_progress
        if tell is None or not output.token_ids:
            return
        spans = self._spans_so_far(sequence.name, len(output.token_ids))
        completion = self._joined(sequence, output, spans, "abort")
        with contextlib.suppress(RuntimeError):  # a loop that was closed: nobody listens any more
            sequence.loop.call_soon_threadsafe(tell, completion)

    def _spans_so_far(self, name: str, num_tokens: int) -> list[tuple[str, int, int]]:
        """The versions of an unfinished sequence's first `num_tokens`, which vLLM keeps but tells only at the end."""
        processor = self._llm.output_processor
        (internal,) = processor.external_req_ids.get(name) or [None]
        state = processor.request_states.get(internal)
        if state is None:
            assert self.version is not None
            return [(_label(self.version), 0, num_tokens)]
        starts = [(label, start) for label, start in state.weight_version_starts if start < num_tokens]
        ends = [start for _, start in starts[1:]] + [num_tokens]
        return [(label, start, end) for (label, start), end in zip(starts, ends, strict=True)]

    def _completion(self, sequence: _Sequence, output: Any) -> Completion:
        spans = [(span.version, span.start, span.end) for span in output.weight_versions or ()]
        reason = output.finish_reason
        completion = self._joined(
            sequence, output, spans, reason if reason in ("stop", "length") else "abort"
        )
        if not np.isfinite(completion.logprobs).all():
            raise Unavailable(
                f"request {sequence.request.request_id!r}: the model's logits under {self.version} are not finite; "
                "newer weights or policy.generation_precision=float32 may help"
            )
        return completion

    def _joined(
        self, sequence: _Sequence, output: Any, spans: list[tuple[str, int, int]], reason: str
    ) -> Completion:
        """Prefix and what vLLM has sampled after it, as one completion."""
        prefix = sequence.request.prefix or empty_completion()
        num_new, done = len(output.token_ids), len(prefix.token_ids)
        logprobs = output.logprobs.logprobs[:num_new] if output.logprobs is not None else []
        token_ids = np.array(output.token_ids, np.int32)
        sampled = np.array(logprobs, np.float32)
        joined = list(prefix.spans)
        for label, start, end in spans:
            version = _parsed(label)
            if end <= start:
                continue
            if joined and joined[-1][:2] == version:
                joined[-1] = joined[-1]._replace(end=done + end)
            else:
                joined.append(VersionSpan(*version, done + start, done + end))
        return Completion(
            np.concatenate([prefix.token_ids, token_ids]),
            np.concatenate([prefix.logprobs, sampled]),
            tuple(joined),
            reason,
        )

    def _abort(self, sequence: _Sequence) -> None:
        sequence.aborted = True
        if sequence.submitted:
            self._background(self._llm.abort(sequence.name))

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _update(self, version: Version, weights: Mapping[str, Tensor]) -> float:
        async with self._updating:
            shared = await asyncio.to_thread(
                SharedWeights, self._layout.completed(weights), self._num_readers
            )
            try:
                await self._llm.collective_rpc("paceline_read_weights", args=(shared.path, shared.manifest))
                await shared.verified(READ_TIMEOUT_S)
                try:
                    return await self._swap(version)
                except BaseException as error:
                    self._error = EngineDied(f"an update to {tuple(version)} failed half-way: {error!r}")
                    raise _died(self._error) from error
            finally:
                shared.close()

    async def _swap(self, version: Version) -> float:
        """Pause, load, resume; returns the seconds without a token."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        started_s = time.monotonic()
        mode = "keep" if self._in_flight else "wait"
        await self._llm.pause_generation(mode=mode, clear_cache=self._recompute)
        running = self.num_running if self._in_flight else 0
        paused_s = self._last_token_s() if running else started_s if self._in_flight else time.monotonic()
        if self._recompute:
            self._feeding.excuse(running)
        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info={}))
        await self._llm.finish_weight_update(_label(version))
        resumed_s = time.monotonic()
        await self._llm.resume_generation()
        self.version = version
        while running and self._live and time.monotonic() < resumed_s + RESUME_TIMEOUT_S:
            if (first_s := self._last_token_s()) > resumed_s:
                return first_s - paused_s
            await asyncio.sleep(0.001)
        return resumed_s - paused_s

    def _last_token_s(self) -> float:
        return max(report.last_token_s for report in self._reports)

    def _on_step(self, preempted: int) -> None:
        latest = [report.latest for report in self._reports]
        self._feeding.step(
            StepReport(
                sum(one.running for one in latest),
                sum(one.waiting for one in latest),
                max(one.kv_use for one in latest),
                preempted,
            )
        )


def _label(version: Version) -> str:
    return f"{version.session}.{version.step}"


def _parsed(label: str) -> Version:
    session, step = label.split(".")
    return Version(int(session), int(step))


def _seed(seed: int, position: int) -> int:
    """vLLM's generator starts anew with a request, so a prefix gets another seed: the same noise twice in one
    completion would not be a sample of the model's distribution.
    """
    if not position:
        return seed
    digest = hashlib.sha256(f"{seed}/{position}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _generation_config(model_name: str) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model_name)
    except OSError:
        return None


def _died(error: BaseException) -> EngineDied:
    if isinstance(error, EngineDied):
        return error
    died = EngineDied(f"the vLLM engine died: {error!r}")
    died.__cause__ = error
    return died

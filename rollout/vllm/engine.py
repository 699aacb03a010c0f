"""The vLLM engine: runs vLLM's AsyncLLM behind the engine protocol, with the run's weights, and leaves no process
behind.

A separate thread (`engine_thread`) runs the asyncio loop of AsyncLLM, so that neither its start nor its bookkeeping for
hundreds of sequences blocks the service. Callers wait for futures. The methods at the end of `VllmEngine` run on that
loop. A guard (`process_guard`) watches vLLM's processes (the engine core, a worker for each part of the model): they
end when this process ends, for whatever reason. Every request is one completion (`requests`); siblings are submitted
one after the other, so vLLM's prefix cache computes their prompt once. vLLM itself reports the versions of tokens.

An update of the weights (`update`) that fails before the pause leaves the old weights in use. An update that fails
during the pause ends the engine, because the weights are then unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.errors import EngineDied, InvalidInput, PacelineError, Unavailable
from paceline.files.bounded_cache import use_own_compiled_code
from paceline.files.model_source import model_source
from paceline.groups import Completion, IntArray, Version
from paceline.models.pretrained import check_model, load_pretrained
from paceline.rollout.engine import GenerationRequest, PromptLogprobs, check_scored_ids, empty_completion
from paceline.rollout.vllm.arguments import engine_arguments, engine_config
from paceline.rollout.vllm.concurrency import ConcurrencyLimit, StepReport
from paceline.rollout.vllm.engine_thread import EngineThread, died
from paceline.rollout.vllm.process_guard import ProcessGuard
from paceline.rollout.vllm.requests import (
    check_speculated,
    completion,
    label_of,
    progress,
    reported_spans,
    sampling_params,
    scored,
    scoring_params,
    spans_so_far,
    stopped,
    version_of,
)
from paceline.rollout.vllm.update import WeightUpdates
from paceline.spec import PolicySection, RunSpec
from paceline.weights.hosts.host_weights import HostWeights
from paceline.weights.model_layout import (
    AdapterSlot,
    WeightLayout,
    end_token_ids,
    generation_dtype,
    meta_layout,
    read_config,
)

if TYPE_CHECKING:
    from paceline.rollout.vllm.reports import Reports

WATCH_S = 0.2
"""Seconds between two checks whether the engine lives, because vLLM does not report its end."""
END_S = 0.5
"""Seconds for the engine's processes to end by themselves, which they never do on CPUs; then the guard kills them."""
SCORING_ATTEMPTS = 3
"""Attempts to score a text under one version; new weights during an attempt cause another attempt."""
log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Sequence:
    request: GenerationRequest
    name: str
    """Id of the request within vLLM, unique over the engine's life, so that the caller's id is free after the request.
    """
    limit: int
    """Largest number of tokens in prompt and completion together."""
    loop: asyncio.AbstractEventLoop
    aborted: bool = False
    submitted: bool = False


class VllmEngine:
    """See `paceline.rollout.engine.Engine`. `device` is cpu or cuda; `load_weights` as in `create_engine`."""

    def __init__(self, spec: RunSpec, *, device: str = "cpu", load_weights: bool = False) -> None:
        """Begin to start the engine; `ready` waits. Raises InvalidInput if vLLM or the model's config is unusable."""
        config = read_config(spec.policy)
        self._spec = spec
        layout = meta_layout(config)
        self._vocab_size = layout.vocab_size
        self._arguments = engine_arguments(spec, config, layout.architecture, device, load_weights)
        if load_weights:
            # vLLM samples with a random head if the files lack it.
            check_model(AutoModelForCausalLM, self._arguments["model"], "policy.model_name")
        lora = spec.policy.lora_cfg.enabled
        self._weights = MergedAdapter(spec.policy, layout, device) if lora else WholeWeights(layout)
        self._max_tokens: int = self._arguments["max_model_len"]
        self._end_ids = end_token_ids(spec.policy, config, _generation_config(spec.policy.model_name))
        self.max_batch_size: int = self._arguments["max_num_seqs"]
        self.version: Version | None = None
        self.closed = False
        self._first = Version(0, 0) if load_weights else None
        use_own_compiled_code()
        self._guard = ProcessGuard()
        try:
            self._config = engine_config(self._arguments, self._guard, device)
        except BaseException:
            self._guard.close()
            raise
        self._live: dict[str, _Sequence] = {}
        self._numbers = itertools.count()
        self._failed: EngineDied | None = None
        self._llm: Any = None
        self._reports: list[Reports] = []
        self._concurrency = ConcurrencyLimit(sure=1, most=self.max_batch_size)
        self._updating = asyncio.Lock()
        self._thread = EngineThread(self._live_once, self._guard.close)
        self._thread.start()

    @property
    def num_running(self) -> int:
        return min(sum(report.latest.running for report in self._reports), len(self._live))

    @property
    def num_waiting(self) -> int:
        return len(self._live) - self.num_running

    @property
    def capacity(self) -> int:
        return self._concurrency.limit

    async def ready(self) -> None:
        await asyncio.shield(asyncio.wrap_future(self._thread.started))

    async def watch(self) -> None:
        await asyncio.shield(asyncio.wrap_future(self._thread.ended))

    async def generate(self, request: GenerationRequest) -> Completion:
        limit = request.limit(self._max_tokens, self._vocab_size)
        if self._arguments.get("speculative_config"):
            check_speculated(request.params)
        prefix = request.prefix
        if prefix is not None and len(request.prompt_ids) + len(prefix.token_ids) >= limit:
            return Completion(prefix.token_ids, prefix.logprobs, prefix.spans, "length")
        self._refuse_if_unready()
        if request.request_id in self._live:
            raise InvalidInput(f"request_id {request.request_id!r} is in use; give every request a separate one")
        name = f"{request.request_id}#{next(self._numbers)}"
        sequence = _Sequence(request, name, limit, asyncio.get_running_loop())
        self._live[request.request_id] = sequence
        try:
            return await self._thread.result(self._thread.submit(self._sample(sequence)))
        finally:
            if self._live.get(request.request_id) is sequence:
                del self._live[request.request_id]

    async def prompt_logprobs(self, token_ids: IntArray) -> PromptLogprobs:
        """See `Engine.prompt_logprobs`. The values are vLLM's, from a request that samples one token more."""
        check_scored_ids(token_ids, self._max_tokens - 1, self._vocab_size)
        self._refuse_if_unready()
        return await self._thread.result(self._thread.submit(self._score(token_ids.tolist())))

    def _refuse_if_unready(self) -> None:
        self._thread.refuse_if_ended()
        if self.version is None:
            raise Unavailable("the engine has no weights yet; call update_weights first")

    def abort(self, request_id: str) -> None:
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._thread.call(self._abort, sequence)

    async def update_weights(self, version: Version, weights: Mapping[str, Tensor]) -> float:
        """See `Engine.update_weights`, and `WeightUpdates.swap` for the pause."""
        await asyncio.to_thread(self._weights.check, weights)
        await self.ready()
        self._thread.refuse_if_ended()
        update = self._thread.submit(self._update(version, weights))
        return await asyncio.shield(self._thread.result(update))

    @property
    def prefix_hits(self) -> int:
        return sum(report.prefix_hits for report in self._reports)

    @property
    def drafts(self) -> tuple[int, int]:
        """Numbers of tokens that speculative decoding drafted, and of those that the policy accepted."""
        return sum(report.drafted for report in self._reports), sum(report.accepted for report in self._reports)

    async def weight_parts(self) -> tuple[list[int], list[int]]:
        """Return two lists with a number for each worker: the bytes of the last version that it has verified, and the
        bytes that it loads of a version. With data parallelism the workers are those of one replica."""
        loaded = await self._thread.result(self._thread.submit(self._updates.loaded_bytes()))
        return self._updates.verified_bytes, loaded

    async def close(self) -> None:
        self._thread.closing = self.closed = True
        started = self._thread.started
        while not started.done():
            # Nothing else interrupts a start, which may still make processes.
            await asyncio.to_thread(self._guard.kill)
            await asyncio.wait([asyncio.wrap_future(started)], timeout=WATCH_S)
        await asyncio.to_thread(self._thread.join)

    # Everything below runs on the engine's thread.

    async def _live_once(self) -> None:
        """Start AsyncLLM, and watch it until `close`. Raises the error that ended it."""
        from vllm.v1.engine.async_llm import AsyncLLM

        from paceline.rollout.vllm.reports import Reports

        def reports(vllm_config: Any, engine_index: int = 0) -> Reports:
            self._reports.append(Reports(self._on_step, vllm_config, engine_index))
            return self._reports[-1]

        self._llm = AsyncLLM.from_vllm_config(self._config, stat_loggers=[reports], disable_log_stats=True)
        try:
            if self._spec.policy.generation.vllm_cfg.pipeline_parallel_size > 1:
                await self._llm.collective_rpc("paceline_make_stage_buffers")
            kv_tokens = sum(report.kv_tokens for report in self._reports)
            self._concurrency = ConcurrencyLimit(sure=kv_tokens // self._max_tokens, most=self.max_batch_size)
            self._updates = WeightUpdates(self._llm, self._spec, self._reports, self._concurrency)
            if self._first is not None:
                await self._llm.update_weight_version(label_of(self._first))
                self._updates.label = label_of(self._first)
                self.version = self._first
            self._guard.started()
            log.info("vLLM has started, with room for %d tokens and %d sequences", kv_tokens, self.max_batch_size)
            self._thread.started.set_result(None)
            while not self._thread.closing:
                if self._llm.errored:
                    raise self._llm.dead_error
                if self._failed is not None:
                    raise self._failed
                await asyncio.sleep(WATCH_S)
            for sequence in list(self._live.values()):
                self._abort(sequence)
            while self._live and not self._llm.errored:  # noqa: ASYNC110 - each is on its way to its caller
                await asyncio.sleep(0.005)
        finally:
            self._llm.shutdown(END_S)

    async def _sample(self, sequence: _Sequence) -> Completion:
        request = sequence.request
        if sequence.aborted:
            return request.prefix or empty_completion()
        stop_ids = {id_ for id_ in (*self._end_ids, *request.params.stop_token_ids) if id_ < self._vocab_size}
        queue = None
        finished = False
        stop = request.stop
        scanner = stop.scanner(request.params.min_new_tokens, request.prefix) if stop is not None else None
        num_seen = 0
        try:
            queue = await self._llm.add_request(
                sequence.name,
                {"prompt_token_ids": request.given_ids.tolist(), "cache_salt": self._updates.label},
                sampling_params(request, sequence.limit, stop_ids),
            )
            sequence.submitted = True
            if sequence.aborted:
                await self._llm.abort(sequence.name)
            while not finished:
                output = queue.get_nowait() or await queue.get()
                finished, sampled = output.finished, output.outputs[0]
                if scanner is not None and scanner.push(sampled.token_ids[num_seen:]):
                    spans = (
                        reported_spans(sampled)
                        if finished
                        else self._spans_so_far(sequence.name, len(sampled.token_ids))
                    )
                    return stopped(request, sampled, spans, scanner)
                num_seen = len(sampled.token_ids)
                if not finished:
                    self._tell_progress(sequence, sampled)
            return completion(request, sampled)
        except (asyncio.CancelledError, PacelineError):
            raise
        except Exception as error:
            if self._llm.errored:
                raise died(error) from error
            raise Unavailable(f"vLLM refused request {request.request_id!r}: {error}") from error
        finally:
            if queue is not None and not finished and not self._llm.errored:
                await self._llm.abort(sequence.name)

    async def _score(self, token_ids: list[int]) -> PromptLogprobs:
        for _ in range(SCORING_ATTEMPTS):
            label, name = self._updates.label, f"score#{next(self._numbers)}"
            final: Any = None
            try:
                prompt = {"prompt_token_ids": token_ids, "cache_salt": label}
                async for output in self._llm.generate(prompt, scoring_params(), name):
                    final = output
            except asyncio.CancelledError:
                raise
            except Exception as error:
                if self._llm.errored:
                    raise died(error) from error
                raise Unavailable(f"vLLM refused to score a text: {error}") from error
            if {label} == {span[0] for span in reported_spans(final.outputs[0])}:
                return scored(token_ids, final.prompt_logprobs, version_of(label))
        raise Unavailable("new weights came during each attempt to score a text; try again")

    def _tell_progress(self, sequence: _Sequence, output: Any) -> None:
        tell = sequence.request.on_progress
        if tell is None or not output.token_ids:
            return
        so_far = progress(sequence.request, output, self._spans_so_far(sequence.name, len(output.token_ids)))
        with contextlib.suppress(RuntimeError):  # a closed loop: no caller waits any more
            sequence.loop.call_soon_threadsafe(tell, so_far)

    def _spans_so_far(self, name: str, num_tokens: int) -> list[tuple[str, int, int]]:
        """Return the versions of an unfinished sequence's first `num_tokens`, which vLLM reports only at the end."""
        processor = self._llm.output_processor
        (internal,) = processor.external_req_ids.get(name) or [None]
        state = processor.request_states.get(internal)
        if state is None:
            assert self.version is not None
            return [(label_of(self.version), 0, num_tokens)]
        return spans_so_far(state.weight_version_starts, num_tokens)

    def _abort(self, sequence: _Sequence) -> None:
        sequence.aborted = True
        if sequence.submitted:
            self._background(self._llm.abort(sequence.name))

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _update(self, version: Version, weights: Mapping[str, Tensor]) -> float:
        async with self._updating:
            whole = await asyncio.to_thread(self._weights.whole, weights)
            async with self._updates.read(whole):
                try:
                    pause_s = await self._updates.swap(version, lambda: len(self._live))
                    self.version = version
                    if (drafts := self.drafts)[0]:
                        log.info(
                            "%d tokens were drafted until version %s, and %d accepted",
                            drafts[0],
                            tuple(version),
                            drafts[1],
                        )
                    return pause_s
                except BaseException as error:
                    self._failed = EngineDied(f"an update to {tuple(version)} failed half-way: {error!r}")
                    raise self._failed from error

    def _on_step(self, preempted: int) -> None:
        latest = [report.latest for report in self._reports]
        running, waiting = sum(each.running for each in latest), sum(each.waiting for each in latest)
        kv_use = max(each.kv_use for each in latest)
        self._concurrency.step(StepReport(running, waiting, kv_use, preempted))


def _generation_config(model_name: str) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model_source(model_name))
    except OSError:
        return None


class WholeWeights:
    """Converts a weight channel's tensors to the whole model's, one update at a time; `check` may run beside it."""

    def __init__(self, layout: WeightLayout) -> None:
        self._layout = layout

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Raise InvalidInput if the channel's `weights` do not fit."""
        self._layout.check(weights)

    def whole(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return checked `weights` as the model's tensors, tied ones under all their names; valid until the next call."""
        return self._layout.completed(weights)


class MergedAdapter(WholeWeights):
    """Whole weights of a run that trains an adapter (`policy.lora_cfg`): the base from `policy.model_name`, in this
    process's memory and in the engine's sampling type; the adapter is merged while the engine decodes."""

    def __init__(self, policy: PolicySection, layout: WeightLayout, device: str) -> None:
        super().__init__(layout)
        auto: Any = AutoModelForCausalLM
        dtype = generation_dtype(policy, device)
        module = load_pretrained(auto, policy.model_name, "policy.model_name", dtype=dtype)
        module.requires_grad_(False)
        self._tensors: dict[str, Tensor] = module.state_dict()
        self._slot = AdapterSlot(module, policy.lora_cfg)

    def check(self, weights: Mapping[str, Tensor]) -> None:
        if isinstance(weights, HostWeights):
            weights.verify()  # the engine's workers see the merged weights only
        self._slot.check(weights)

    def whole(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        self._slot.replace(weights)
        return self._layout.completed(self._tensors)

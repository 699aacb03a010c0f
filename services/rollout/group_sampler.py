"""Samples leased groups: each completion is generated, or continued from the tokens of an earlier attempt. Also reloads
a chat template that was corrected on disk, and measures the worker's pace for its heartbeats."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from paceline.chat.completion_texts import END_THINK, THINK, completion_text, opens_reasoning
from paceline.data.tokens import encode_prompt, load_tokenizer
from paceline.errors import InvalidInput, WireError
from paceline.files.whole_file import stamp
from paceline.groups import Completion, IntArray, continued_spans
from paceline.rollout.engine import Engine, GenerationRequest, SamplingParams, sample_seed
from paceline.rollout.stop_strings import StopStrings
from paceline.spec import PolicySection, RunSpec
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import decode_completions

FILES = ("chat_template*", "tokenizer_config.json")


class TemplateFile:
    """The files of one tokenizer that may hold its chat template. `reload` may be called from any thread."""

    def __init__(self, policy: PolicySection):
        self._policy = policy
        self._folder = Path(policy.tokenizer_name or policy.model_name).expanduser()
        self._stamp = stamp(self._folder, FILES)
        self._lock = threading.Lock()
        self.reloads = 0
        """Number of reloads. An attempt that began before a reload may fail because of the old template."""

    def reload(self, tokenizer: Any) -> bool:
        """Set `tokenizer`'s template to the one on disk; return whether it changed."""
        with self._lock:
            now = stamp(self._folder, FILES)
            if now == self._stamp:
                return False
            self._stamp = now
            try:
                template = load_tokenizer(self._policy).chat_template
            except InvalidInput as error:
                log.error("the changed chat template cannot be read: %s", error)
                return False
            if template == tokenizer.chat_template:
                return False
            tokenizer.chat_template = template
            self.reloads += 1
        log.warning("the chat template in %s was changed and is reloaded", self._folder)
        return True


log = logging.getLogger(__name__)


class GroupSampler:
    """Samples one run's groups. New tokens name `member_id` as their sampler. `on_sample_end` gets each ended sample's
    group, `on_warning` each warning once."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        spec: RunSpec,
        member_id: str,
        on_sample_end: Callable[[int], object],
        on_warning: Callable[[str], Awaitable[None]] | None = None,
    ):
        self._engine, self._tokenizer, self._spec, self._member_id = engine, tokenizer, spec, member_id
        self._on_sample_end, self._on_warning = on_sample_end, on_warning
        self.params = SamplingParams.from_spec(spec.policy.generation)
        self.stop = StopStrings.of(tokenizer, spec.policy.generation.stop_strings)
        """Stop strings of the run. They end external requests too."""
        self._request_ids: dict[str, None] = {}
        self.generated_tokens = 0

    async def sample(self, lease: pb.Lease, prefix: bytes | None) -> tuple[IntArray, list[Completion]]:
        """Return the prompt's tokens and the completions. Raises InvalidInput and the errors of `Engine.generate`."""
        earlier = None if prefix is None else _read_prefix(lease, prefix)
        prompt, data = json.loads(lease.prompt_json), self._spec.data
        if earlier is not None:
            prompt_ids, begun = earlier
        else:
            tools = json.loads(lease.tools_json) if lease.tools_json else None
            template = data.apply_chat_template, data.chat_template_kwargs
            prompt_ids = encode_prompt(self._tokenizer, prompt, *template, tools)
            begun = [None] * lease.num_generations
        if self._on_warning is not None and opens_reasoning(self._tokenizer, prompt_ids):
            on_warning, self._on_warning = self._on_warning, None
            for text in warnings_of_opening(self._spec):
                await on_warning(text)
        completions = await gather_or_cancel(
            self._sample_completion(lease, i, prompt_ids, begun[i]) for i in range(lease.num_generations)
        )
        opened = begins_in_reasoning(self._spec, self._tokenizer, prompt, prompt_ids)
        return prompt_ids, [
            Completion(c.token_ids, c.logprobs, c.spans, c.finish_reason, self.text(c, in_reasoning=opened))
            for c in completions
        ]

    def abort(self) -> None:
        """End all running samples, with the tokens that they have."""
        for request_id in list(self._request_ids):
            self._engine.abort(request_id)

    def text(self, completion: Completion, *, in_reasoning: bool = False) -> str:
        end_of = self.stop.end if self.stop is not None else None
        return completion_text(self._tokenizer, completion, end_of, in_reasoning=in_reasoning)

    async def _sample_completion(
        self, lease: pb.Lease, index: int, prompt_ids: IntArray, begun: Completion | None
    ) -> Completion:
        try:
            if begun is not None and begun.finish_reason != "abort":
                return begun
            request_id = f"{lease.group_id}/{lease.attempt}/{index}"
            self._request_ids[request_id] = None
            prefix = begun if begun is not None and len(begun.token_ids) else None
            seed = sample_seed(lease.seed, lease.attempt, index)
            params = SamplingParams.from_proto(lease.params, self.params)
            request = GenerationRequest(request_id, prompt_ids, params, seed, prefix, stop=self.stop)
            try:
                completion = await self._engine.generate(request)
            finally:
                del self._request_ids[request_id]
            self.generated_tokens += len(completion.token_ids) - (len(prefix.token_ids) if prefix else 0)
            spans = continued_spans(prefix.spans if prefix else (), completion.spans, self._member_id)
            return replace(completion, spans=spans)
        finally:
            self._on_sample_end(lease.group_id)


def begins_in_reasoning(spec: RunSpec, tokenizer: Any, prompt: Any, prompt_ids: IntArray) -> bool:
    """Return whether the chat template opened the reasoning, so that completions of the prompt begin with reasoning."""
    is_chat = not isinstance(prompt, str) or spec.data.apply_chat_template == "always"
    return is_chat and opens_reasoning(tokenizer, prompt_ids)


def warnings_of_opening(spec: RunSpec) -> list[str]:
    """Return a warning for each reward that expects `<think>` in completions, if the run's prompts end with `<think>`."""
    remedies = [
        (reward.label, f"leave {THINK} out of the pattern of the reward")
        for reward in spec.rewards
        if reward.function == "format_regex" and THINK in str(reward.kwargs.get("pattern"))
    ] + [
        (reward.label, "set think_in_prompt: true in the kwargs of the reward")
        for reward in spec.rewards
        if reward.function == "think_answer_format" and not reward.kwargs.get("think_in_prompt")
    ]
    return [
        f"prompts end with {THINK}, so completions have {END_THINK} alone, and reward {label!r} may give every completion 0; {remedy}"
        for label, remedy in remedies
    ]


def _read_prefix(lease: pb.Lease, prefix: bytes) -> tuple[IntArray, Sequence[Completion | None]] | None:
    """Return the prompt's tokens and an earlier worker's unfinished completions; None if the prefix cannot be used."""
    reasons = lease.prefix_finish_reasons
    try:
        prompt_ids, begun = decode_completions(prefix, reasons, [""] * len(reasons))
    except WireError as error:
        log.error("group %d starts from the beginning: %s", lease.group_id, error)
        return None
    if len(begun) != lease.num_generations:
        log.error(
            "group %d starts from the beginning: its earlier attempt has %d completions, but the lease is for %d completions",
            lease.group_id,
            len(begun),
            lease.num_generations,
        )
        return None
    return prompt_ids, begun


class Pace:
    """Measures a worker's pace between heartbeats. The worker begins without a lease."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._empty_since_s: float | None = clock()
        self._empty_s = 0.0
        """Seconds without a lease until now, except the seconds since `_empty_since_s`."""
        self._counted = (clock(), 0)
        """Clock and tokens when the number of tokens was last found to have grown."""
        self._tokens_per_s = 0.0
        self._is_idle = True
        """True if a heartbeat found neither a lease nor new tokens: the next tokens count from the next lease."""
        self._reported = (clock(), 0.0)
        """Clock and seconds without a lease at the last heartbeat."""

    def begin_work(self) -> None:
        if self._empty_since_s is not None:
            now_s = self._clock()
            self._empty_s += now_s - self._empty_since_s
            self._empty_since_s = None
            if self._is_idle:
                self._counted, self._is_idle = (now_s, self._counted[1]), False

    def end_work(self) -> None:
        self._empty_since_s = self._clock()

    def gauges(self, generated_tokens: int) -> dict[str, float]:
        """Return a heartbeat's gauges; `generated_tokens` counts the tokens of all completions that this worker ended.
        The pace is measured until the newest completions, so it does not change while a slow model decodes the next
        ones."""
        now_s, empty_s = self._clock(), self._empty_s
        if self._empty_since_s is not None:
            empty_s += now_s - self._empty_since_s
        counted_s, tokens = self._counted
        if generated_tokens > tokens:
            self._tokens_per_s = (generated_tokens - tokens) / max(now_s - counted_s, 1e-6)
            self._counted = (now_s, generated_tokens)
        elif self._empty_since_s is not None:
            self._tokens_per_s, self._is_idle = 0.0, True
        since_s, earlier_empty_s = self._reported
        self._reported = (now_s, empty_s)
        elapsed_s = max(now_s - since_s, 1e-6)
        return {"tokens_per_s": self._tokens_per_s, "wait_fraction": min(1.0, (empty_s - earlier_empty_s) / elapsed_s)}


ResultT = TypeVar("ResultT")


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Return the coroutines' results. The first error cancels the other coroutines, and is raised when they have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]

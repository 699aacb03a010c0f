"""The interface of an engine, which gets token ids and returns sampled ones with log-probabilities and version spans.

Promise of every engine: every token has the log-probability under the distribution that it was sampled from, and the
version of the weights that made it; a request's tokens depend on its seed, not on the rest of the batch; weights change
only between two decode steps; and an abort loses no generated token.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from paceline.errors import InvalidInput, PromptTooLong
from paceline.groups import Completion, FloatArray, IntArray, Version
from paceline.rollout.stop_strings import StopStrings
from paceline.spec import GenerationSection

if TYPE_CHECKING:
    import torch

    from paceline.v1 import common_pb2


MAX_ID = 2**31 - 1
"""Largest token id, because engines keep ids in 32 or 64 bits."""
MAX_STOP_IDS = 256
"""Largest number of stop tokens of one request; the longest list sets the width of the batch's table."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. Raises InvalidInput for a value outside its range."""

    max_new_tokens: int
    """Longest completion in tokens, including a prefix."""
    min_new_tokens: int = 0
    """Stop tokens have probability 0 until the completion has this many tokens."""
    temperature: float = 1.0
    """Divisor of the logits; above 0 (1e-4 is practically greedy)."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probability reaches this; 1 keeps all."""
    top_k: int = 0
    """Number of likeliest tokens that are kept; 0 keeps all."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the completion, besides the engine's end of sequence."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the likeliest token's probability; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Repetition penalty: divides positive and multiplies negative logits of tokens seen in prompt or completion."""

    def __post_init__(self) -> None:
        for name, good, allowed in (
            ("max_new_tokens", self.max_new_tokens > 0, "positive"),
            ("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, "from 0 to max_new_tokens"),
            ("temperature", 0 < self.temperature < math.inf, "finite and above 0; use 1e-4 for greedy decoding"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", 0 <= self.top_k <= MAX_ID, f"from 0 to {MAX_ID}"),
            ("min_p", 0 <= self.min_p < 1, "from 0 to below 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "finite and above 0; 1 means no penalty"),
            (
                "stop_token_ids",
                len(self.stop_token_ids) <= MAX_STOP_IDS
                and all(0 <= token_id <= MAX_ID for token_id in self.stop_token_ids),
                f"at most {MAX_STOP_IDS} ids from 0 to {MAX_ID}",
            ),
        ):
            if not good:
                raise InvalidInput(f"{name} is {getattr(self, name)!r:.200}, but must be {allowed}")

    @classmethod
    def from_spec(cls, generation: GenerationSection) -> SamplingParams:
        return cls(**{field.name: getattr(generation, field.name) for field in fields(cls)})

    @classmethod
    def from_proto(cls, params: common_pb2.SamplingParams, run: SamplingParams) -> SamplingParams:
        """Return a lease's parameters: all fields of its message `params`, the other parameters from `run`."""
        return replace(
            run,
            max_new_tokens=params.max_new_tokens,
            min_new_tokens=params.min_new_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            stop_token_ids=tuple(params.stop_token_ids),
        )

    @classmethod
    def from_request(cls, params: common_pb2.SamplingParams, default: SamplingParams) -> SamplingParams:
        """Return the parameters of a caller's request; zero or unset lengths, temperatures and stop ids, and every
        parameter that a request cannot set, come from `default`."""
        return replace(
            default,
            max_new_tokens=params.max_new_tokens or default.max_new_tokens,
            min_new_tokens=params.min_new_tokens,
            temperature=params.temperature or default.temperature,
            top_p=params.top_p or 1.0,
            top_k=params.top_k,
            stop_token_ids=tuple(params.stop_token_ids) or default.stop_token_ids,
        )


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """One completion to sample."""

    request_id: str
    """Name of the request for `abort`; unique among the requests that run or wait."""
    prompt_ids: IntArray
    """[P] tokens of the prompt."""
    params: SamplingParams
    seed: int
    """Seed of each token's random number, whatever the batch. After a prefix `native` continues with the numbers of an
    uninterrupted request; `vllm` draws others."""
    prefix: Completion | None = None
    """An unfinished completion that a worker has returned; generation continues from its end."""
    on_progress: Callable[[Completion], None] | None = None
    """Function called whenever new tokens are sampled, with all tokens so far in the form in which an abort returns
    them: on the caller's loop, in order, never after `generate` has returned. The last tokens may come only with the
    result."""
    stop: StopStrings | None = None
    """Strings that end the completion, besides the stop tokens."""

    @property
    def given_ids(self) -> IntArray:
        """Tokens of prompt and prefix, which an engine computes before it samples."""
        prefix = self.prefix
        return self.prompt_ids if prefix is None else np.concatenate([self.prompt_ids, prefix.token_ids])

    def limit(self, max_tokens: int, vocab_size: int) -> int:
        """Return the largest number of tokens that prompt and completion may have together. Raises InvalidInput for a
        request that could later fail in an engine whose model takes `max_tokens`."""
        if self.prefix is not None:
            check_prefix(self.prefix)
        check_prompt_length(len(self.prompt_ids), max_tokens)
        ids = self.given_ids
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise InvalidInput(
                f"prompt and prefix have token ids from {ids.min()} to {ids.max()}, but the model has 0 to "
                f"{vocab_size - 1}; check that the tokenizer is the model's own"
            )
        return min(len(self.prompt_ids) + self.params.max_new_tokens, max_tokens)


@dataclass(frozen=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of given tokens under the model itself: temperature 1, no masks."""

    logprobs: FloatArray
    """[P] log-probability of each token given those before it; NaN for the first token."""
    top_ids: IntArray
    """[P] id of the likeliest token at each position; -1 at the first."""
    top_logprobs: FloatArray
    """[P] log-probability of the likeliest token; the number in `logprobs` if the given token is as likely; NaN at the
    first.
    """
    version: Version
    """The version that computed all these log-probabilities."""


class Engine(Protocol):
    """A sampler with one set of weights, used from one asyncio loop."""

    version: Version | None
    """Version of the weights in use; None before the first ones."""
    max_batch_size: int
    """Number of sequences that are decoded at a time; further sequences wait."""

    @property
    def num_running(self) -> int:
        """Number of sequences in the batch."""

    @property
    def num_waiting(self) -> int:
        """Number of requests that are not in the batch yet."""

    @property
    def capacity(self) -> int:
        """Number of sequences that the engine should have now, running and waiting; may change with every step."""

    async def ready(self) -> None:
        """Wait until the engine can take weights. Raises EngineDied if it did not start, Unavailable if closed."""

    async def watch(self) -> None:
        """Wait until the engine is closed. Raises EngineDied once it has died, even if no caller waits for a token."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Return the completion of `request`, including a prefix, with an empty `text`. Cancelling aborts the request.
        Raises InvalidInput: the prompt leaves no room or holds unknown tokens, or the id is in use. Raises Unavailable:
        no weights yet, closed, or logits that are not finite. Raises EngineDied: the engine stopped on an error."""

    async def prompt_logprobs(self, token_ids: IntArray) -> PromptLogprobs:
        """Return the log-probabilities of the [P] `token_ids`, which one version computes in one forward pass. Raises
        InvalidInput: no tokens, too many, or unknown ones. Raises Unavailable and EngineDied like `generate`."""

    def abort(self, request_id: str) -> None:
        """Make this request's `generate` return its tokens so far, with finish_reason `abort`. Ignores unknown ids."""

    async def update_weights(self, version: Version, weights: Mapping[str, torch.Tensor]) -> float:
        """Put `weights` in use as `version`, between two decode steps. Names are those of the model's state_dict. If
        the run trains an adapter (policy.lora_cfg), only the adapter comes, with the names of
        `paceline.weights.format.lora_names`. Weights in a segment of host memory (`HostWeights`) are mapped and loaded
        from there. Return the seconds in which no token was sampled because of the update. The tensors must not change
        before the call returns. A cancelled call may still take effect, which `version` shows.

        Raises InvalidInput: a name is missing or unknown, a shape is wrong, an element is not finite. Raises WireError:
        bytes of `HostWeights` are not the sender's. The old weights stay in use.
        """

    async def close(self) -> None:
        """End the engine. Unfinished requests return the tokens sampled so far, with finish_reason `abort`."""


def check_prompt_length(num_tokens: int, max_tokens: int) -> None:
    """Raise InvalidInput for a prompt without tokens, and PromptTooLong for a prompt that leaves no room for a
    completion: prompt and completion together have at most `max_tokens`."""
    if not 0 < num_tokens < max_tokens:
        raise (PromptTooLong if num_tokens else InvalidInput)(
            f"the prompt has {num_tokens} tokens, but must have 1 to {max_tokens - 1}: "
            "policy.max_total_sequence_length (or the model) bounds prompt and completion together"
        )


def check_scored_ids(token_ids: IntArray, max_tokens: int, vocab_size: int) -> None:
    """Raise InvalidInput for tokens that `Engine.prompt_logprobs` does not accept."""
    if not 0 < len(token_ids) <= max_tokens:
        raise (PromptTooLong if len(token_ids) else InvalidInput)(
            f"the text to score has {len(token_ids)} tokens, but must have 1 to {max_tokens}: "
            "policy.max_total_sequence_length (or the model) bounds it"
        )
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise InvalidInput(
            f"the text to score has token ids from {token_ids.min()} to {token_ids.max()}, but the model has 0 to "
            f"{vocab_size - 1}; check that the tokenizer is the model's own"
        )


def check_prefix(prefix: Completion) -> None:
    """Raise InvalidInput if `prefix` cannot be continued: it has ended, or tokens, numbers and spans disagree."""
    num_tokens = len(prefix.token_ids)
    if prefix.finish_reason != "abort":
        raise InvalidInput(f"prefix ended with {prefix.finish_reason!r}; only 'abort' can be continued")
    if len(prefix.logprobs) != num_tokens:
        raise InvalidInput(
            f"prefix cannot be continued: it has {num_tokens} tokens but {len(prefix.logprobs)} log-probabilities"
        )
    ends = [0, *(span.end for span in prefix.spans)]
    if ends[-1] != num_tokens or any(
        span.start != end or span.end <= span.start for span, end in zip(prefix.spans, ends, strict=False)
    ):
        raise InvalidInput(f"prefix spans {[span[:4] for span in prefix.spans]} do not cover its {num_tokens} tokens")


def empty_completion() -> Completion:
    return Completion(np.empty(0, np.int32), np.empty(0, np.float32), (), "abort")


def sample_seed(group_seed: int, attempt: int, index: int) -> int:
    """Return the seed, of 63 bits, of sample `index` in an attempt at a group."""
    digest = hashlib.sha256(f"{group_seed}/{attempt}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1

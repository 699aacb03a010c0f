"""Evaluates a model behind an OpenAI-compatible endpoint, Paceline's or another.

Promise: a request ends in an answer or in an error. A request that the service refuses is a failed problem; a service
that does not answer after all attempts ends the evaluation, because its absence says nothing about the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.apps.evaluation.problems import ContinuationScore, split
from paceline.chat.completion_texts import message_text
from paceline.data.messages import api_message
from paceline.errors import InvalidInput, Unavailable
from paceline.groups import Completion
from paceline.reward.endpoints.client import BadAnswer, Endpoint, EndpointUnavailable, RequestRefused
from paceline.reward.endpoints.settings import EndpointSettings
from paceline.rollout.engine import sample_seed
from paceline.spec import RunSpec

Json = dict[str, Any]

SEED_BITS = 31
"""Number of bits in a seed that every service accepts."""
READS_TOKENS = ("length", "soft_overlong")
"""Built-in reward functions that count tokens, which an OpenAI-compatible endpoint does not return."""

NAMES_OF_STOPS = ("stop_reason", "matched_stop")
"""Fields that vLLM and SGLang use for the stop string that ended a choice."""

log = logging.getLogger(__name__)


class _Echoed(NamedTuple):
    tokens: list[str]
    logprobs: list[float]
    """Log-probability of each token; NaN for the first one."""
    tops: list[float]
    """Log-probability of the likeliest token at each position."""


class UrlModel:
    """Completions are texts only: reward functions get no token ids."""

    def __init__(self, spec: RunSpec, endpoint: Endpoint, model: str, concurrency: int) -> None:
        self._spec, self._endpoint = spec, endpoint
        self.name = model
        self.concurrency = concurrency
        self._opens = any(reward.kwargs.get("think_in_prompt") is True for reward in spec.rewards)
        """True if the chat template opens the reasoning; only the rewards' settings say so."""
        self._warned = False

    async def sample(self, prompt: Any, index: int, seed: int, tools: list[Any] | None = None) -> list[Completion]:
        """See `EvaluatedModel.sample`. Sends one request for each completion, because not every service supports `n`."""
        route, body = self._body(prompt)
        if tools is not None:
            body["tools"] = tools
        seeds = [sample_seed(seed, index, each) for each in range(self._spec.grpo.val_samples_per_prompt)]
        answers = await asyncio.gather(
            *(self._post(route, {**body, "seed": each % (1 << SEED_BITS)}) for each in seeds)
        )
        return [self._completion(answer) for answer in answers]

    async def score(self, prompt: Any, continuations: Sequence[str]) -> list[ContinuationScore]:
        """See `EvaluatedModel.score`. The service echoes the text (`echo`) with its log-probabilities."""
        if not isinstance(prompt, str) or self._spec.data.apply_chat_template == "always":
            raise InvalidInput(
                "an endpoint returns log-probabilities of plain texts only; set data.apply_chat_template=never, and "
                "remove data.system_prompt"
            )
        pairs = [split(prompt, each) for each in continuations]
        begin, rest = pairs[0][0], [each for _, each in pairs]
        tokens = (await self._echoed(begin)).tokens if begin else []
        return await asyncio.gather(*(self._score(begin, each, tokens) for each in rest))

    def _body(self, prompt: Any) -> tuple[str, Json]:
        data, generation = self._spec.data, self._spec.policy.generation
        body: Json = {
            "model": self.name,
            "max_tokens": generation.max_new_tokens,
            "temperature": generation.temperature,
            "top_p": generation.top_p,
        }
        further = {
            "stop": list(generation.stop_strings),
            "top_k": generation.top_k,
            "min_p": generation.min_p,
            "min_tokens": generation.min_new_tokens,
            "stop_token_ids": list(generation.stop_token_ids),
        }
        body |= {name: value for name, value in further.items() if value}
        if generation.repetition_penalty != 1.0:
            body["repetition_penalty"] = generation.repetition_penalty
        if isinstance(prompt, str) and data.apply_chat_template != "always":
            return "completions", body | {"prompt": prompt}
        if data.chat_template_kwargs:
            body["chat_template_kwargs"] = data.chat_template_kwargs
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if messages[-1]["role"] == "assistant":
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return "chat/completions", body | {"messages": [api_message(message) for message in messages]}

    def _completion(self, answer: Json) -> Completion:
        """Return the completion in an answer, with the text that the same model would give in this process. Services
        other than Paceline return reasoning and calls separately, and name the stop string instead of including it."""
        try:
            choice = answer["choices"][0]
            text = choice.get("completion")
            if not isinstance(text, str):
                text = choice["text"] if "text" in choice else message_text(choice["message"], in_reasoning=self._opens)
                text += self._stop_string(choice)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise InvalidInput(
                f"the service's answer has no completion ({error!r}); check that it serves OpenAI's API"
            ) from None
        nothing = np.empty(0)
        reason = str(choice.get("finish_reason") or "stop")
        return Completion(nothing.astype(np.int32), nothing.astype(np.float32), (), reason, str(text or ""))

    def _stop_string(self, choice: Json) -> str:
        """Return the stop string that ended a choice, empty for another end. Warns if the service does not name it."""
        strings = self._spec.policy.generation.stop_strings
        named = [choice[name] for name in NAMES_OF_STOPS if name in choice]
        if strings and not named and choice.get("finish_reason") == "stop" and not self._warned:
            self._warned = True
            log.warning("the service does not name the stop string that ended a completion, so the texts end before it")
        return next((each for each in named if each in strings), "")

    async def _score(self, prompt: str, continuation: str, tokens: list[str]) -> ContinuationScore:
        """Return the log-probability of the continuation after a prompt with these tokens. Raises InvalidInput if the
        prompt has other tokens inside the whole text, because such a service encodes only the whole text."""
        whole = await self._echoed(prompt + continuation)
        start = len(tokens) or 1
        if whole.tokens[: len(tokens)] != tokens:
            raise InvalidInput(
                "a token of the service spans the border between the prompt and the continuation "
                f"{continuation!r:.60}, so it cannot be scored alone; begin evaluation.continuation with a space, or "
                "evaluate the model in this process"
            )
        if not prompt and "".join(whole.tokens).startswith(continuation):
            raise InvalidInput(
                "the service puts no token before the text, so the first token of a continuation without a prompt has no "
                "log-probability; give the row a prompt, or evaluate the model in this process"
            )
        if not whole.logprobs[start:]:
            raise InvalidInput(
                "a continuation adds no token to its prompt, so it has no log-probability; correct evaluation.continuation"
            )
        logprobs = whole.logprobs[start:]
        greedy = all(each >= top for each, top in zip(logprobs, whole.tops[start:], strict=True))
        return ContinuationScore(sum(logprobs), greedy)

    async def _echoed(self, text: str) -> _Echoed:
        """Return the tokens of a text with their log-probabilities. Raises InvalidInput if the service returns none."""
        body = {"model": self.name, "prompt": text, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        answer = await self._post("completions", body)
        try:
            found, end = answer["choices"][0]["logprobs"], _prompt_tokens(answer)
            return _Echoed(
                [str(each) for each in found["tokens"][:end]],
                [math.nan if each is None else float(each) for each in found["token_logprobs"][:end]],
                [max(each.values()) if each else 0.0 for each in found["top_logprobs"][:end]],
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise InvalidInput(
                f"the service does not return the log-probabilities of a prompt (echo with logprobs: {error!r}); use a "
                "service that does, such as `paceline serve model`"
            ) from None

    async def _post(self, route: str, body: Json) -> Json:
        try:
            return await self._endpoint.post(route, body)
        except EndpointUnavailable as error:
            raise Unavailable(str(error)) from None
        except (RequestRefused, BadAnswer) as error:
            raise InvalidInput(str(error)) from None


@contextlib.asynccontextmanager
async def opened_url(spec: RunSpec, settings: EndpointSettings) -> AsyncIterator[UrlModel]:
    """Open the model behind an endpoint; an empty `settings.model` means its only model. Raises InvalidInput for a
    function that reads tokens, Unavailable if the service does not answer."""
    for reward in spec.rewards:
        if reward.function in READS_TOKENS and spec.evaluation.method == "sample":
            raise InvalidInput(
                f"reward function {reward.function!r} counts tokens, but an endpoint returns texts only; remove the "
                "function"
            )
    try:
        async with Endpoint(settings, lambda name, value: None) as endpoint:
            name = settings.model or await _only_model(endpoint, settings.base_url)
            yield UrlModel(spec, endpoint, name, settings.max_concurrency)
    except EndpointUnavailable as error:
        raise Unavailable(str(error)) from None


async def _only_model(endpoint: Endpoint, url: str) -> str:
    """Return the name of the endpoint's only model; Paceline's `NAME@VERSION` is another name of `NAME`."""
    try:
        names = [str(entry["id"]) for entry in (await endpoint.get("models"))["data"]]
    except (RequestRefused, BadAnswer, KeyError, TypeError) as error:
        raise InvalidInput(f"{url}/models does not list models ({error!r}); name one in --model-name") from None
    models = [name for name in names if name.partition("@")[0] == name or name.partition("@")[0] not in names]
    if len(models) != 1:
        raise InvalidInput(
            f"{url} serves {len(models)} models ({', '.join(models[:8])}); name one of them in --model-name"
        )
    return models[0]


def _prompt_tokens(answer: Json) -> int:
    usage = answer.get("usage")
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if not isinstance(count, int):
        raise InvalidInput(
            "the service does not say how many tokens a prompt has (usage.prompt_tokens); use a service that does"
        )
    return count

"""Evaluates a model in this process, through its engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.apps.evaluation.problems import ContinuationScore, split
from paceline.apps.model_server.serving import ServedModel
from paceline.chat.completion_texts import completion_text, opens_reasoning
from paceline.data.tokens import encode_continuation, encode_prompt
from paceline.errors import InvalidInput
from paceline.groups import Completion, IntArray
from paceline.rollout.engine import GenerationRequest, sample_seed
from paceline.rollout.stop_strings import StopStrings
from paceline.services.rollout.group_sampler import begins_in_reasoning, warnings_of_opening

log = logging.getLogger(__name__)


class EngineModel:
    """Samples with the generation settings of the spec that the model was opened with."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self.name = served.spec.policy.model_name
        self.concurrency = served.engine.max_batch_size

    async def sample(self, prompt: Any, index: int, seed: int, tools: list[Any] | None = None) -> list[Completion]:
        served, generation = self._served, self._served.spec.policy.generation
        ids = self._encode(prompt, tools)
        stop = StopStrings.of(served.tokenizer, generation.stop_strings)
        opened = begins_in_reasoning(served.spec, served.tokenizer, prompt, ids)
        if index == 0 and opens_reasoning(served.tokenizer, ids):
            for text in warnings_of_opening(served.spec):
                log.warning(text)
        requests = [
            GenerationRequest(f"eval/{index}/{each}", ids, served.params, sample_seed(seed, index, each), stop=stop)
            for each in range(served.spec.grpo.val_samples_per_prompt)
        ]
        done = await asyncio.gather(*(served.engine.generate(request) for request in requests))
        end_of = stop.end if stop is not None else None
        return [
            replace(each, text=completion_text(served.tokenizer, each, end_of, in_reasoning=opened)) for each in done
        ]

    async def score(self, prompt: Any, continuations: Sequence[str]) -> list[ContinuationScore]:
        """See `EvaluatedModel.score`. A continuation's tokens follow the prompt's, in the encoding of the whole text."""
        pairs = [self._pair(prompt, each) for each in continuations]
        return await asyncio.gather(*(self._score(ids, start) for ids, start in pairs))

    def _encode(self, prompt: Any, tools: list[Any] | None = None) -> IntArray:
        data = self._served.spec.data
        return encode_prompt(self._served.tokenizer, prompt, data.apply_chat_template, data.chat_template_kwargs, tools)

    def _pair(self, prompt: Any, continuation: str) -> tuple[IntArray, int]:
        """Return the tokens of prompt and continuation, and the index of the continuation's first token. If a token
        spans both, the continuation is encoded separately, so that all of it is scored."""
        is_text = isinstance(prompt, str) and self._served.spec.data.apply_chat_template != "always"
        if is_text:
            prompt, continuation = split(prompt, continuation)
        if prompt == "" and is_text:
            return self._behind_start(self._encode(continuation))
        begin = self._encode(prompt)
        whole = self._encode(prompt + continuation) if is_text else begin[:0]
        if not np.array_equal(whole[: len(begin)], begin):
            whole = np.concatenate([begin, self._in_place(begin, continuation)])
        return whole, len(begin)

    def _behind_start(self, ids: IntArray) -> tuple[IntArray, int]:
        """Return the tokens of a text without a prompt, preceded by the BOS token (or else EOS), and the index 1."""
        bos, eos = self._served.tokenizer.bos_token_id, self._served.tokenizer.eos_token_id
        if bos is not None and ids[:1].tolist() == [bos]:
            return ids, 1
        return np.concatenate([[eos if bos is None else bos], ids]).astype(np.int32), 1

    def _in_place(self, begin: IntArray, continuation: str) -> IntArray:
        """Return the tokens of a text after other tokens. Raises InvalidInput if they do not decode to the text."""

        def decoded(ids: Any) -> str:
            return str(self._served.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

        found = encode_continuation(self._served.tokenizer, begin.tolist(), continuation)
        if decoded([*begin, *found]) == decoded(begin) + continuation:
            return found
        raise InvalidInput(
            f"a token spans the border between the prompt and the continuation {continuation!r:.60}, and the tokenizer "
            "encodes the continuation alone as another text; begin evaluation.continuation with a space"
        )

    async def _score(self, ids: IntArray, start: int) -> ContinuationScore:
        if start >= len(ids):
            raise InvalidInput(
                "a continuation adds no token to its prompt, so it has no log-probability; correct evaluation.continuation"
            )
        found = await self._served.engine.prompt_logprobs(ids)
        logprob = float(found.logprobs[start:].astype(np.float64).sum())
        # A token that ties with the likeliest one counts as greedy, whichever of them the engine names.
        greedy = bool((found.logprobs[start:] >= found.top_logprobs[start:]).all())
        return ContinuationScore(logprob, greedy)

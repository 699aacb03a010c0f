"""Scores texts with a classification model that vLLM serves (`vllm serve MODEL --runner pooling`), for models that need
several GPUs (the server's `--tensor-parallel-size`).

Promise: the same scores as `paceline.reward.models.scorer` up to the rounding of the server's type, because token ids
are sent and outputs without an activation come back. If the server gives no answer, there is no score.

`POST /pooling` {model, input: [[ids], …], task, use_activation: false} → {data: [{index, data}]}, where data is [L] outputs
of `classify` or [T][L] of `token_classify` (vLLM's online serving of pooling models, 0.11 and later).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.errors import InvalidInput, Unreadable
from paceline.models.loading import fault_of_load
from paceline.reward.endpoints.client import BadAnswer, Endpoint, EndpointUnavailable, RequestRefused
from paceline.reward.endpoints.settings import EndpointSettings
from paceline.reward.models.scorer import (
    Scorer,
    Text,
    TextEncoder,
    chances_at_steps,
    check_kind,
    check_separator,
    fetched,
    load_scorer,
    longest_text,
    passes,
)
from paceline.reward.models.settings import ModelSettings, ProcessModelSettings


def open_scorer(settings: ModelSettings) -> Scorer | PooledScorer:
    """Load the model, or open the server that holds it. Raises InvalidInput for another kind of model or damaged files,
    and Unreadable if files or the device are missing or the server is not reachable."""
    return load_scorer(settings) if settings.endpoint is None else PooledScorer(settings)


class PooledScorer:
    """A model on a server, with the interface of `paceline.reward.models.scorer.Scorer`."""

    def __init__(self, settings: ModelSettings) -> None:
        """Read the tokenizer and the server's model list. Raises InvalidInput for a model of another kind, Unreadable
        if files or the server cannot be read now."""
        from transformers import AutoConfig, AutoTokenizer

        assert settings.endpoint is not None
        self._settings = settings
        self._endpoint = settings.endpoint.model_copy(
            update={"base_url": settings.endpoint.base_url.removesuffix("/v1")}
        )
        source, _ = fetched(settings.path, weights=False)
        try:
            config = AutoConfig.from_pretrained(source)
            check_kind(settings, config)
            tokenizer = AutoTokenizer.from_pretrained(source)
        except Exception as error:
            fault = fault_of_load("reward model", settings.path, error)
            if fault is None:
                raise
            raise fault from None
        check_separator(settings, tokenizer)
        self._texts = TextEncoder(settings, tokenizer)
        self._num_outputs = int(config.num_labels)
        self.version = f"{self._endpoint.model} at {self._endpoint.base_url}"
        self._max_tokens = min(longest_text(config), asyncio.run(_longest_of_server(self._endpoint)))

    def encode(self, prompt: Any, completion: Any) -> Text:
        return self._texts.encode(prompt, completion)

    def scores(
        self, texts: Sequence[Text], ran: Callable[[int], None] = lambda texts: None
    ) -> list[list[float] | None]:
        """Return scores like `Scorer.scores`, by concurrent requests of `max_batch_tokens` each. Raises
        EndpointUnavailable without an answer, InvalidInput for an invalid answer."""
        found: list[list[float] | None] = [None] * len(texts)
        fitting = [index for index, text in enumerate(texts) if len(text.ids) <= self._max_tokens]
        lengths = [len(texts[index].ids) for index in fitting]
        requests = [
            [fitting[position] for position in chosen] for chosen in passes(lengths, self._settings.max_batch_tokens)
        ]
        answers = asyncio.run(self._ask([[texts[index].ids for index in request] for request in requests]))
        for request, answer in zip(requests, answers, strict=True):
            for index, outputs in zip(request, answer, strict=True):
                found[index] = self._score(texts[index], outputs)
            ran(len(request))
        return found

    async def _ask(self, requests: Sequence[Sequence[list[int]]]) -> list[list[Any]]:
        by_step = isinstance(self._settings, ProcessModelSettings)
        body = {
            "model": self._endpoint.model,
            "task": "token_classify" if by_step else "classify",
            "use_activation": False,
        }

        async def ask(texts: Sequence[list[int]]) -> list[Any]:
            return _outputs(await endpoint.post("pooling", {**body, "input": list(texts)}), len(texts))

        async with Endpoint(self._endpoint, _uncounted) as endpoint:
            try:
                return list(await asyncio.gather(*map(ask, requests)))
            except (BadAnswer, RequestRefused) as error:
                raise InvalidInput(f"the server of the reward model {self.version}: {error}") from None

    def _score(self, text: Text, outputs: Any) -> list[float]:
        by_step = isinstance(self._settings, ProcessModelSettings)
        shape = (len(text.ids), self._num_outputs) if by_step else (1,)
        try:
            tensor = torch.tensor(outputs, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError):
            tensor = torch.empty(0)
        if tuple(tensor.shape) != shape:
            raise InvalidInput(
                f"the server of the reward model {self.version} returns outputs of shape {list(tensor.shape)}, not "
                f"{list(shape)}; check that it is the model of path {self._settings.path!r}"
            )
        if isinstance(self._settings, ProcessModelSettings):
            values = chances_at_steps(tensor[text.places], self._settings)
        else:
            values = tensor.tolist()
        if not all(map(math.isfinite, values)):
            raise InvalidInput(f"the model {self._settings.path!r} gives a score that is not finite")
        return values


def _uncounted(name: str, value: float) -> None:
    """Count nothing: sums belong to a call of a function, and a model's process has no such call."""


def _outputs(answer: dict[str, Any], count: int) -> list[Any]:
    rows = answer.get("data")
    found: dict[Any, Any] = {}
    if isinstance(rows, list):
        found = {row.get("index"): row.get("data") for row in rows if isinstance(row, dict)}
    if sorted(found, key=str) != sorted(range(count), key=str):
        raise BadAnswer(f"the answer {str(answer)[:200]} does not have one result for each of {count} texts")
    return [found[index] for index in range(count)]


async def _longest_of_server(settings: EndpointSettings) -> int:
    """Return the length in tokens of the longest text that the server accepts. Raises Unreadable if the server does not
    serve the model."""
    try:
        async with Endpoint(settings, _uncounted) as endpoint:
            answer = await endpoint.get("v1/models")
    except (EndpointUnavailable, RequestRefused, BadAnswer) as error:
        raise Unreadable(
            f"the reward model server does not answer as expected: {error}; start it with vllm serve MODEL --runner pooling"
        ) from None
    models = answer.get("data")
    served = {
        row.get("id"): row.get("max_model_len")
        for row in (models if isinstance(models, list) else [])
        if isinstance(row, dict)
    }
    if settings.model not in served:
        raise Unreadable(
            f"{settings.base_url} serves {', '.join(map(str, served)) or 'no model'}, not {settings.model!r}; correct endpoint.model"
        )
    longest = served[settings.model]
    return longest if isinstance(longest, int) and longest > 0 else 1 << 30

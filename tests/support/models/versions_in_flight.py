"""Sequences that live through several versions of the weights, each token checked against its own version's."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import torch

from paceline.groups import Completion, Version
from paceline.rollout.engine import Engine, GenerationRequest, SamplingParams

NUM_SEQUENCES = 64
NUM_VERSIONS = 5
TOKENS_EACH = 32
"""Fewest tokens of a sequence under each version: together more than a block of the KV cache, which is 128 on a CPU."""
PROMPTS = [np.arange(1 + i % 20, dtype=np.int32) % 23 for i in range(NUM_SEQUENCES)]
Deliver = Callable[[Version, dict[str, torch.Tensor]], Awaitable[Any]]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not holds():  # noqa: ASYNC110 - progress comes by callback, often
            await asyncio.sleep(0.01)


def requests(num_tokens: int) -> list[GenerationRequest]:
    params = SamplingParams(num_tokens)
    return [GenerationRequest(f"s{i}", prompt, params, seed=1000 + i) for i, prompt in enumerate(PROMPTS)]


async def check_versions(
    engine: Engine,
    make_model: Callable[..., Any],
    architecture: str,
    tied: bool,
    reference_logprobs: Any,
    deliver: Deliver | None = None,
) -> None:
    """Let 64 sequences live through 5 versions; every token's log-probability is that of its version's weights."""
    deliver = deliver or engine.update_weights
    models = [make_model(architecture, tied=tied, seed=seed) for seed in range(NUM_VERSIONS)]
    await deliver(Version(1, 0), models[0].state_dict())
    so_far: dict[str, Completion] = {}

    def watched(request: GenerationRequest) -> GenerationRequest:
        def told(completion: Completion) -> None:
            so_far[request.request_id] = completion

        return dataclasses.replace(request, on_progress=told)

    def all_have(step: int) -> bool:
        spans = [completion.spans[-1] for completion in so_far.values()]
        return len(spans) == NUM_SEQUENCES and all(s.step == step and s.end - s.start >= TOKENS_EACH for s in spans)

    tasks = [asyncio.create_task(engine.generate(watched(request))) for request in requests(3000)]
    for step, model in enumerate(models):
        if step:
            await deliver(Version(1, step), model.state_dict())
        await until(lambda step=step: all_have(step))  # type: ignore[misc]
    for i in range(NUM_SEQUENCES):
        engine.abort(f"s{i}")
    completions = await asyncio.gather(*tasks)
    worst = 0.0
    for i, completion in enumerate(completions):
        assert [span.step for span in completion.spans] == list(range(NUM_VERSIONS))
        assert [span.start for span in completion.spans] == [0, *(s.end for s in completion.spans[:-1])]
        assert completion.spans[-1].end == len(completion.token_ids)
        told = so_far[f"s{i}"]
        assert told.token_ids.tolist() == completion.token_ids[: len(told.token_ids)].tolist()
        assert told.spans[:-1] == completion.spans[:-1]
        for span in completion.spans:
            expected = reference_logprobs(models[span.step], PROMPTS[i], completion)
            worst = max(worst, np.abs(completion.logprobs - expected)[span.start : span.end].max())
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    print(f"{num_tokens} tokens under {NUM_VERSIONS} versions, largest difference {worst:.1e}")
    assert worst <= 2e-5

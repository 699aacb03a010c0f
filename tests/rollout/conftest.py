"""Tiny causal language models with random weights, and engines that are closed at the end of a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from paceline.groups import Completion
from paceline.rollout.engine import Engine
from paceline.rollout.engines import create_engine
from paceline.spec import RunSpec

VOCAB_SIZE = 23
MAX_TOKENS = 4096
VLLM_KV_CACHE_BYTES = 256 << 20
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_TOKENS,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    """`make_model("qwen3" | "llama", tied=True, seed=0)`: a model with grouped-query attention, in float32."""

    @cache
    def make(architecture: str = "qwen3", tied: bool = True, seed: int = 0) -> Any:
        torch.manual_seed(seed)
        if architecture == "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied)).eval()
        return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).eval()

    return make


@pytest.fixture(scope="session")
def make_spec_in() -> Callable[[Path], Callable[..., RunSpec]]:
    """`make_spec_in(folder)` is like `make_spec`, with the model's config in `folder`."""
    return spec_maker


@pytest.fixture
def make_spec(tmp_path: Path) -> Callable[..., RunSpec]:
    """`make_spec(model, max_batch_size=…, max_total_sequence_length=…, async_grpo={…})`: only the config is saved."""
    return spec_maker(tmp_path)


def spec_maker(folder: Path) -> Callable[..., RunSpec]:
    """Return `make_spec`, with the model's config in `folder`."""

    def make(
        model: Any,
        max_batch_size: int = 8,
        max_total_sequence_length: int = MAX_TOKENS,
        backend: str = "native",
        async_grpo: dict[str, Any] | None = None,
        generation_precision: str = "auto",
        vllm_cfg: dict[str, Any] | None = None,
        **generation: Any,
    ) -> RunSpec:
        model.config.save_pretrained(folder)
        if backend == "vllm":
            generation["vllm_cfg"] = {"kv_cache_memory_bytes": VLLM_KV_CACHE_BYTES, **(vllm_cfg or {})}
        return RunSpec.model_validate(
            {
                "policy": {
                    "model_name": str(folder),
                    "max_total_sequence_length": max_total_sequence_length,
                    "generation_precision": generation_precision,
                    "generation": {
                        "backend": backend,
                        "max_new_tokens": 8,
                        "max_batch_size": max_batch_size,
                        **generation,
                    },
                },
                "data": {"train": "train.jsonl"},
                "rewards": [{"function": "exact_match"}],
                "async_grpo": async_grpo or {},
            }
        )

    return make


@pytest_asyncio.fixture
async def start_engine() -> AsyncIterator[Callable[[RunSpec], Engine]]:
    """`start_engine(spec)`: an engine that is closed after the test."""
    engines: list[Engine] = []

    def start(spec: RunSpec) -> Engine:
        engines.append(create_engine(spec))
        return engines[-1]

    yield start
    for engine in engines:
        await engine.close()


@pytest.fixture(scope="session")
def vllm_engine(
    make_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Engine]]:
    """`vllm_engine()`: an engine of `make_spec(make_model(), backend="vllm")`, shared by tests because it starts slowly; a new
    one after a test closed it."""
    engines: list[Any] = []

    def get() -> Engine:
        if not engines or engines[-1].closed:
            folder = tmp_path_factory.mktemp("vllm")
            engines.append(create_engine(spec_maker(folder)(make_model(), backend="vllm")))
        return engines[-1]  # type: ignore[no-any-return]

    yield get
    for engine in engines:
        asyncio.run(engine.close())


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """`await until(lambda: …)`: returns when it holds, fails after a minute."""

    async def wait(holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():  # noqa: ASYNC110 - the engine's counters have no event to wait for
                await asyncio.sleep(0)

    return wait


@pytest.fixture
def reference_logprobs() -> Callable[..., Any]:
    """`reference_logprobs(model, prompt_ids, completion)` [T]: by one plain forward pass of the Hugging Face model."""

    def compute(model: Any, prompt_ids: Any, completion: Completion, temperature: float = 1.0) -> Any:
        ids_1L = torch.from_numpy(np.concatenate([prompt_ids, completion.token_ids]).astype(np.int64))[None]
        with torch.no_grad():
            logprobs_LV = (model(ids_1L).logits[0, :-1] / temperature).log_softmax(-1)
        logprobs_L = logprobs_LV.gather(1, ids_1L[0, 1:, None])[:, 0]
        return logprobs_L[len(prompt_ids) - 1 :].numpy()

    return compute

"""The endpoint over a real engine, for the public OpenAI client. A test file gives the model, by a fixture `folder`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from endpoint_run import FIRST, RUN, EndpointRun, make_spec
from openai import AsyncOpenAI
from transformers import Qwen3ForCausalLM

from paceline.data.tokens import load_tokenizer
from paceline.rollout.engine import Engine, SamplingParams
from paceline.rollout.engines import create_engine
from paceline.services.rollout.openai.server import Endpoint


@pytest.fixture(params=["native", pytest.param("vllm", marks=pytest.mark.vllm)])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def vllm_engine(folder: Path) -> Iterator[Engine]:
    """Return one engine for the whole module, because it takes long to start."""
    engine = create_engine(make_spec(folder, "vllm"))
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def weights(folder: Path) -> Callable[[float], dict[str, torch.Tensor]]:
    """`weights(scale)`: the model's, scaled, so that versions differ."""
    auto: Any = Qwen3ForCausalLM
    state = auto.from_pretrained(folder, dtype=torch.float32).state_dict()
    return lambda scale=1.0: {name: tensor * scale for name, tensor in state.items()}


@pytest_asyncio.fixture
async def run(request: pytest.FixtureRequest, folder: Path, backend: str, weights: Any) -> AsyncIterator[EndpointRun]:
    spec = make_spec(folder, backend)
    if backend == "vllm":
        engine = request.getfixturevalue("vllm_engine")
    else:
        engine = await asyncio.to_thread(create_engine, spec)
    await engine.update_weights(FIRST, weights())
    params = SamplingParams.from_spec(spec.policy.generation)
    yield EndpointRun(RUN, spec, engine, load_tokenizer(spec.policy), params)
    if backend == "native":
        await engine.close()


@pytest_asyncio.fixture
async def url(run: EndpointRun) -> AsyncIterator[str]:
    endpoint = Endpoint(lambda: run)
    yield f"http://127.0.0.1:{await endpoint.start('127.0.0.1', 0)}/v1"
    await endpoint.close()


@pytest_asyncio.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    async def wait(holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():  # noqa: ASYNC110 - the engine's counters have no event to wait for
                await asyncio.sleep(0.005)

    return wait

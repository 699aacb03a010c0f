"""`paceline serve model`: serve an engine with one model's weights through the endpoint of a rollout worker.

Promise: nothing trains beside it, and the model never changes: its version is 0.0 until the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.groups import Completion
from paceline.rollout.engine import Engine, GenerationRequest, SamplingParams
from paceline.services.rollout.openai.server import Endpoint, Gate, Recorder
from paceline.spec import RunSpec

QUEUE = 256
"""Largest number of running and waiting sequences, as a multiple of those that the engine decodes at a time."""


@dataclass
class ServedModel:
    """A model that clients know as `run_id`; see `paceline.services.rollout.openai.sampling.Served`."""

    run_id: str
    spec: RunSpec
    engine: Engine
    tokenizer: Any
    params: SamplingParams

    async def generate_external(self, request: GenerationRequest) -> Completion:
        return await self.engine.generate(request)


def model_label(model: str) -> str:
    """Return the name of a model for clients: the id of a run, or the last part of a folder or URL."""
    return Path(model.removeprefix("run:").rstrip("/")).name or "model"


def registered_name(model: str) -> str:
    """Return NAME:VERSION of a registered model's folder; empty for any other model."""
    from paceline.apps.registry.statement import read_statement
    from paceline.errors import DataError
    from paceline.files.names import STATEMENT
    from paceline.files.storage import Folder

    try:
        predicate = read_statement(Folder(model).read(STATEMENT))["predicate"]
    except (OSError, DataError):
        return ""
    return f"{predicate['name']}:{predicate['version']}"


@contextlib.asynccontextmanager
async def opened_model(spec: RunSpec, name: str, device: str = "cpu") -> AsyncIterator[ServedModel]:
    """Load the model of `spec`, and close its engine at the end. Raises InvalidInput, EngineDied."""
    from transformers.utils.logging import disable_progress_bar

    from paceline.data.tokens import load_tokenizer
    from paceline.rollout.engines import create_engine

    disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = await asyncio.to_thread(load_tokenizer, spec.policy)
    engine = await asyncio.to_thread(create_engine, spec, device=device, load_weights=True)
    try:
        await engine.ready()
        params = SamplingParams.from_spec(spec.policy.generation)
        yield ServedModel(name, spec, engine, tokenizer, params)
    finally:
        await engine.close()


@contextlib.asynccontextmanager
async def endpoint_of(
    served: ServedModel, host: str, port: int, recorder: Recorder | None = None
) -> AsyncIterator[str]:
    """Serve a model, and yield the endpoint's base URL. Raises Conflict if the port is taken."""
    endpoint = Endpoint(lambda: served, make_gate=partial(Gate, share=1, queue=QUEUE), recorder=recorder)
    try:
        taken = await endpoint.start(host, port)
        yield f"{endpoint.scheme}://{f'[{host}]' if ':' in host else host}:{taken}/v1"
    finally:
        await endpoint.close()

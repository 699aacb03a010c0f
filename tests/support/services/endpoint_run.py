"""A run for the endpoint: an engine with its run's name, without a coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.groups import Completion, Version
from paceline.rollout.engine import Engine, GenerationRequest, SamplingParams
from paceline.spec import RunSpec

RUN = "demo-1"
FIRST = Version(1, 4)
BATCH = 16


def make_spec(folder: Path, backend: str) -> RunSpec:
    generation: dict[str, Any] = {"backend": backend, "max_new_tokens": 24, "max_batch_size": BATCH}
    if backend == "vllm":
        generation["vllm_cfg"] = {"kv_cache_memory_bytes": 256 << 20}
    return RunSpec.model_validate(
        {
            "policy": {
                "model_name": str(folder),
                "max_total_sequence_length": 4096,
                "generation": generation,
            },
            "data": {"train": "train.jsonl"},
            "rewards": [{"function": "exact_match"}],
        }
    )


@dataclass
class EndpointRun:
    """A run for the endpoint: an engine with its run's name, without a coordinator."""

    run_id: str
    spec: RunSpec
    engine: Engine
    tokenizer: Any
    params: SamplingParams

    async def generate_external(self, request: GenerationRequest) -> Completion:
        return await self.engine.generate(request)

"""Engines: tokens per second by the number of sequences, log-probabilities against the learner's, and pauses for new weights."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_cases.kernels import bus_speed
from paceline.groups import Version
from paceline.learner.batch.samples import TrainingSample, pack_samples
from paceline.learner.model.policy import load_policy, packed_logprobs
from paceline.rollout.engine import Completion, Engine, GenerationRequest, SamplingParams
from paceline.rollout.engines import create_engine
from paceline.spec import RunSpec
from paceline.spec.reading import parse_spec
from paceline.weights.format.manifest import TensorPlan, WeightManifest
from paceline.weights.hosts.host_weights import HostWeights, SegmentPair
from paceline.weights.model_layout import meta_layout, read_config

SWAPS = 5
PROMPT_TOKENS = 32
PACKED = 16
"""Sequences in a row of the learner."""


def pace(folder: Path, device: torch.device, backend: str, sequences: list[int], new_tokens: int) -> dict[str, Any]:
    """Generate completions of `new_tokens` tokens, for each number of sequences in flight."""
    spec = _spec(folder, backend, max(sequences), new_tokens)

    async def measure(engine: Engine) -> dict[str, Any]:
        found = {}
        for count in sequences:
            await _generate(engine, _requests(spec, count, 8))
            started_s = time.perf_counter()
            completions = await _generate(engine, _requests(spec, count, new_tokens))
            taken_s = time.perf_counter() - started_s
            tokens = sum(len(completion.token_ids) for completion in completions)
            found[str(count)] = {"tokens_per_s": tokens / taken_s, "ms_a_token": 1e3 * taken_s / new_tokens}
        return found

    return _with_engine(spec, device, measure, load_weights=True)


def mismatch(folder: Path, device: torch.device, backend: str, sequences: int, new_tokens: int) -> dict[str, Any]:
    """Compare log-probabilities of sampled tokens, the engine's in bfloat16 with the learner's in bfloat16 and in float32."""
    found = {}
    for float32_head in (False, True):
        spec = _spec(folder, backend, sequences, new_tokens, float32_head=float32_head)
        requests = _requests(spec, sequences, new_tokens)

        async def sample(engine: Engine, requests: list[GenerationRequest] = requests) -> list[Completion]:
            return await _generate(engine, requests)

        samples = [
            TrainingSample(number, request.prompt_ids, each.token_ids, each.logprobs, each.version_steps())
            for number, (request, each) in enumerate(
                zip(requests, _with_engine(spec, device, sample, load_weights=True), strict=True)
            )
        ]
        head = "float32 head" if float32_head else "head as weights"
        for precision in ("bfloat16", "float32"):
            policy = spec.policy.model_copy(update={"precision": precision})
            found[f"{head}, learner {precision}"] = _compared(load_policy(policy, device), samples, device)
    return found


def _compared(model: Any, samples: list[TrainingSample], device: torch.device) -> dict[str, float]:
    with torch.no_grad():
        current_N = torch.cat(
            [
                packed_logprobs(
                    model, pack_samples(samples[at : at + PACKED], device), temperature=1.0, chunk_tokens=1024
                )[0].cpu()
                for at in range(0, len(samples), PACKED)
            ]
        )
    behaviour_N = torch.from_numpy(np.concatenate([each.behaviour_logprobs_T for each in samples]))
    difference_N = current_N - behaviour_N
    ratio_N = difference_N.exp()
    return {
        "tokens": len(ratio_N),
        "mean_abs": difference_N.abs().mean().item(),
        "max_abs": difference_N.abs().max().item(),
        "mean_ratio": ratio_N.mean().item(),
        "k3": (ratio_N - 1 - difference_N).mean().item(),
        "ratios_above_2": (ratio_N > 2).float().mean().item(),
    }


def swap(folder: Path, device: torch.device, backend: str) -> dict[str, Any]:
    """Load versions from a segment of host memory into an engine; the pause against what the bus needs for as many bytes."""
    spec = _spec(folder, backend, 8, 8)
    shapes = meta_layout(read_config(spec.policy)).shapes
    plans = [TensorPlan(name, "bfloat16", tuple(shape)) for name, shape in shapes.items()]
    layout = WeightManifest.plan(plans, bucket_bytes=64 << 20)
    segments = SegmentPair()

    async def load(engine: Engine) -> list[float]:
        pauses_s = []
        for step in range(SWAPS):
            segment, generation = segments.begin(layout.total_bytes, layout.bucket_bytes, 60.0)
            segment.flat().fill_(step + 1)  # small numbers
            segment.complete()
            weights = HostWeights(segment, generation, layout, "compared")
            pauses_s.append(await engine.update_weights(Version(1, step), weights))
            segments.release(segment)
        return pauses_s

    pauses_s = _with_engine(spec, device, load)
    bytes_per_s = bus_speed(device)
    limit_s = layout.total_bytes / (0.7 * bytes_per_s) + 0.05
    return {
        "bytes": layout.total_bytes,
        "first_pause_s": pauses_s[0],
        "pause_s": statistics.median(pauses_s[2:]),
        "bus_gigabytes_per_s": bytes_per_s / 1e9,
        "limit_s": limit_s,
        "within_limit": statistics.median(pauses_s[2:]) <= limit_s,
    }


def _spec(folder: Path, backend: str, sequences: int, new_tokens: int, *, float32_head: bool = False) -> RunSpec:
    generation = {"backend": backend, "max_new_tokens": new_tokens, "max_batch_size": sequences}
    if backend == "vllm":
        generation["vllm_cfg"] = {"gpu_memory_utilization": 0.5}
    policy = {
        "model_name": str(folder),
        "max_total_sequence_length": 1024,
        "generation_precision": "bfloat16",
        "float32_head": float32_head,
        "generation": generation,
    }
    return parse_spec({"policy": policy, "data": {"train": "none.jsonl"}, "rewards": [{"function": "exact_match"}]})


def _requests(spec: RunSpec, count: int, new_tokens: int) -> list[GenerationRequest]:
    """Return requests with random prompts, whose completions no stop token ends."""
    vocabulary = read_config(spec.policy).vocab_size
    prompts = np.random.default_rng(0).integers(0, vocabulary, (count, PROMPT_TOKENS), dtype=np.int32)
    params = SamplingParams(new_tokens, min_new_tokens=new_tokens)
    return [
        GenerationRequest(f"{new_tokens}-{number}", prompt, params, seed=number)
        for number, prompt in enumerate(prompts)
    ]


async def _generate(engine: Engine, requests: list[GenerationRequest]) -> list[Completion]:
    return await asyncio.gather(*map(engine.generate, requests))


def _with_engine(
    spec: RunSpec,
    device: torch.device,
    work: Callable[[Engine], Awaitable[Any]],
    *,
    load_weights: bool = False,
) -> Any:
    async def run() -> Any:
        engine = create_engine(spec, device=device.type, load_weights=load_weights)
        try:
            await engine.ready()
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(run())

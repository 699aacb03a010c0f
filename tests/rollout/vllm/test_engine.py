"""Tests of the vLLM engine alone: its numbers against the learner's, versions in flight, parallel workers, its death."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from flat_tensors import pack
from versions_in_flight import NUM_SEQUENCES, NUM_VERSIONS, PROMPTS, check_versions, requests, until

from paceline.errors import EngineDied, WireError
from paceline.groups import Completion, Version
from paceline.learner.batch.samples import TrainingSample, pack_samples
from paceline.learner.model.policy import load_policy, packed_logprobs
from paceline.rollout.engine import Engine, GenerationRequest, SamplingParams
from paceline.rollout.vllm.process_guard import VARIABLE
from paceline.spec import PolicySection, RunSpec
from paceline.weights.format.packing import checksums, plan
from paceline.weights.hosts.host_weights import HostWeights, SegmentPair

pytestmark = pytest.mark.vllm
WAIT_S = 300.0
SHARED_BYTES = 5 * 32 * 4
"""Norms of the two layers and the last one, which both workers of a tensor-parallel engine load."""


def learner_logprobs(folder: Path, model: Any, completions: list[Completion], dtype: torch.dtype) -> Any:
    """[N] by the learner's own forward pass over packed rows, its parameters in `dtype`."""
    model.save_pretrained(folder)
    policy = PolicySection.model_validate({"model_name": str(folder), "precision": "float32"})
    policy_model = load_policy(policy, torch.device("cpu"))
    for parameter in policy_model.parameters():  # as in the learner's mixed precision, for forward and backward
        parameter.data = parameter.data.to(dtype)
    sequences = [
        TrainingSample(i, prompt, completion.token_ids)
        for i, (prompt, completion) in enumerate(zip(PROMPTS, completions, strict=True))
    ]
    packed = pack_samples(sequences, torch.device("cpu"))
    with torch.no_grad():
        logprobs_N, _ = packed_logprobs(policy_model, packed, temperature=1.0, chunk_tokens=4096)
    return logprobs_N.float().numpy()


class HostMemory:
    """A host's memory that versions arrive in, and the engine that loads them from there."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._segments = engine, SegmentPair()
        self.pauses_s: list[float] = []

    async def deliver(self, version: Version, tensors: dict[str, torch.Tensor], damage: int = 0) -> None:
        """Bring a version, with one byte changed on its way unless `damage` is 0. Raises the engine's errors."""
        layout = plan(tensors, 1 << 12)
        flat = pack(tensors, layout)
        manifest = layout.with_checksums(checksums(flat, layout))
        segment, generation = self._segments.begin(layout.total_bytes, layout.bucket_bytes, WAIT_S)
        segment.flat().copy_(flat)
        if damage:
            segment.flat()[-1] ^= damage
        segment.complete()
        try:
            weights = HostWeights(segment, generation, manifest)
            self.pauses_s.append(await self._engine.update_weights(version, weights))
        finally:
            self._segments.release(segment)


def engine_pids(engine: Any) -> dict[str, int]:
    """The engine's processes by title, found by the guard's mark."""
    mark = engine._guard.environment[VARIABLE]
    found = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get(VARIABLE) == mark:
                found[" ".join(process.cmdline())] = process.pid
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


async def test_its_numbers_are_the_learners_and_versions_are_exact_in_flight_until_a_worker_is_killed(
    start_engine: Callable[[RunSpec], Engine],
    make_spec: Callable[..., RunSpec],
    make_model: Callable[..., Any],
    reference_logprobs: Any,
    tmp_path: Path,
) -> None:
    """Share one engine, because a start takes most of a test's time."""
    model = make_model("qwen3", tied=True)
    engine = start_engine(make_spec(model, backend="vllm", max_batch_size=NUM_SEQUENCES))

    # Log-probabilities: float32, 4,096 tokens, against the learner's forward pass.
    await engine.update_weights(Version(1, 0), model.state_dict())
    completions = await asyncio.gather(*(engine.generate(request) for request in requests(64)))
    sampled = np.concatenate([completion.logprobs for completion in completions])
    assert len(sampled) == 4096
    learnt = learner_logprobs(tmp_path / "qwen3", model, list(completions), torch.float32)
    print(f"float32: largest difference {np.abs(sampled - learnt).max():.1e} over {len(sampled)} tokens")
    assert np.abs(sampled - learnt).max() <= 2e-5

    # Siblings share their prompt's computation: blocks are 128 tokens.
    prompt = (np.arange(300) % 23).astype(np.int32)
    siblings = [GenerationRequest(f"g{i}", prompt, SamplingParams(4), seed=i) for i in range(8)]
    before = engine.prefix_hits  # type: ignore[attr-defined]
    for completion in await asyncio.gather(*map(engine.generate, siblings)):
        expected = reference_logprobs(model, prompt, completion)
        assert np.abs(completion.logprobs - expected).max() <= 2e-5
    assert engine.prefix_hits - before == 7 * 256  # type: ignore[attr-defined]

    # The prefix cache is cleared with the weights.
    other = make_model("qwen3", tied=True, seed=7)
    await engine.update_weights(Version(1, 1), other.state_dict())
    again = await engine.generate(dataclasses.replace(siblings[0], request_id="again"))
    assert np.abs(again.logprobs - reference_logprobs(other, prompt, again)).max() <= 2e-5

    await check_versions(engine, make_model, "qwen3", True, reference_logprobs)

    # Its death: waiting and later callers get the reason, and no process is left.
    waiting = asyncio.create_task(engine.generate(requests(3000)[0]))
    watch = asyncio.create_task(engine.watch())
    await until(lambda: engine.num_running == 1)
    pids = engine_pids(engine)
    worker = max(pid for line, pid in pids.items() if "resource_tracker" not in line)
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(EngineDied, match="died"):
        await waiting
    with pytest.raises(EngineDied):
        await watch
    with pytest.raises(EngineDied):
        await engine.generate(requests(4)[1])
    await engine.close()
    assert engine_pids(engine) == {}


async def started(engine: Engine) -> Any:
    """Return the engine when it is up; skip the test, with a reason, if vLLM does not start several workers."""
    try:
        await engine.ready()
    except EngineDied as error:
        pytest.skip(f"vLLM does not start two workers on this machine: {error}")
    return engine


@pytest.mark.parametrize(
    "parallel",
    ["tensor", pytest.param("pipeline", marks=pytest.mark.slow), pytest.param("data", marks=pytest.mark.slow)],
)
async def test_two_parallel_workers_hold_exact_versions_of_an_untied_llama(
    start_engine: Callable[[RunSpec], Engine],
    make_spec: Callable[..., RunSpec],
    make_model: Callable[..., Any],
    reference_logprobs: Any,
    parallel: str,
) -> None:
    """The versions come into segments that both workers map; each verifies and loads its part."""
    model = make_model("llama", tied=False)
    workers = {f"{parallel}_parallel_size": 2}
    spec = make_spec(model, backend="vllm", max_batch_size=NUM_SEQUENCES, vllm_cfg=workers)
    engine = await started(start_engine(spec))
    memory = HostMemory(engine)
    await check_versions(engine, make_model, "llama", False, reference_logprobs, memory.deliver)
    assert min(memory.pauses_s) > 0

    whole = sum(tensor.nbytes for tensor in model.state_dict().values())
    largest = max(tensor.nbytes for tensor in model.state_dict().values())
    verified, loaded = await engine.weight_parts()
    print(f"{parallel}: of {whole} bytes each worker verified {verified} and loaded {loaded}")
    assert sum(verified) == whole
    assert len(verified) == 2
    assert max(verified) - min(verified) <= largest
    if parallel == "data":
        assert loaded == [whole]
    else:
        assert len(loaded) == 2
        assert whole <= sum(loaded) <= whole + SHARED_BYTES
        assert max(loaded) <= 0.6 * whole

    # One worker finds a byte that is not the sender's: no worker loads anything.
    with pytest.raises(WireError, match=r"worker [01] of the engine: tensor '[^']*' arrived with xxh3_64"):
        await memory.deliver(Version(1, NUM_VERSIONS), make_model("llama", tied=False, seed=99).state_dict(), damage=1)
    last = make_model("llama", tied=False, seed=NUM_VERSIONS - 1)
    (still,) = await asyncio.gather(*map(engine.generate, requests(16)[5:6]))
    assert [span.step for span in still.spans] == [NUM_VERSIONS - 1]
    assert np.abs(still.logprobs - reference_logprobs(last, PROMPTS[5], still)).max() <= 2e-5


def mixed_logprobs(model: Any, cache: Any, ids_1L: torch.Tensor, start: int) -> Any:
    """[L - start - 1] of the tokens after `start`, by `model` with the keys and values in `cache` up to there."""
    with torch.no_grad():
        logits_LV = model(ids_1L[:, start:], past_key_values=cache, use_cache=True).logits[0, :-1]
    return logits_LV.log_softmax(-1).gather(1, ids_1L[0, start + 1 :, None])[:, 0].numpy()


@pytest.mark.parametrize("after", [False, 3])
async def test_keys_and_values_that_are_kept_are_the_old_weights_and_the_label_is_exact(
    after: bool | int,
    start_engine: Callable[[RunSpec], Engine],
    make_spec: Callable[..., RunSpec],
    make_model: Callable[..., Any],
    reference_logprobs: Any,
) -> None:
    old, new = (make_model(seed=seed) for seed in (0, 1))
    kept = {"recompute_kv_cache_after_weight_updates": after}
    engine = start_engine(make_spec(old, backend="vllm", async_grpo=kept))
    await engine.update_weights(Version(1, 0), old.state_dict())
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests(600)[:8]]
    await until(lambda: engine.num_running == 8)
    await engine.update_weights(Version(1, 1), new.state_dict())
    for prompt, completion in zip(PROMPTS, await asyncio.gather(*tasks), strict=False):
        before, after = completion.spans
        assert (before[:2], after[:2]) == ((1, 0), (1, 1))
        assert (before.start, before.end, after.end) == (0, after.start, 600)
        by_old = reference_logprobs(old, prompt, completion)[: before.end]
        assert np.abs(completion.logprobs[: before.end] - by_old).max() <= 2e-5
        # The last token of before is the first whose key and value are the new weights'.
        ids_1L = torch.from_numpy(np.concatenate([prompt, completion.token_ids]).astype(np.int64))[None]
        last = len(prompt) + before.end - 1
        with torch.no_grad():
            cache = old(ids_1L[:, :last], use_cache=True).past_key_values
        by_both = mixed_logprobs(new, cache, ids_1L, last)
        assert np.abs(completion.logprobs[before.end :] - by_both).max() <= 2e-5
        by_new = reference_logprobs(new, prompt, completion)[before.end :]
        assert np.abs(by_both - by_new).max() > 1e-3


async def test_bfloat16_is_as_close_as_bfloat16_can_be(
    start_engine: Callable[[RunSpec], Engine],
    make_spec: Callable[..., RunSpec],
    make_model: Callable[..., Any],
    tmp_path: Path,
) -> None:
    model = make_model("llama", tied=True)
    spec = make_spec(model, backend="vllm", max_batch_size=NUM_SEQUENCES, generation_precision="bfloat16")
    engine = start_engine(spec)
    await engine.update_weights(Version(1, 0), model.state_dict())
    completions = await asyncio.gather(*(engine.generate(request) for request in requests(64)))
    sampled = np.concatenate([completion.logprobs for completion in completions])
    learnt = learner_logprobs(tmp_path / "llama", model, list(completions), torch.bfloat16)
    print(f"bfloat16: mean difference {np.abs(sampled - learnt).mean():.1e} over {len(sampled)} tokens")
    assert np.abs(sampled - learnt).mean() <= 0.02

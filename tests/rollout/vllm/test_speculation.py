"""Speculative decoding of the real vLLM: the same tokens, log-probabilities and versions as without it; and every engine
argument that a run may set."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from versions_in_flight import PROMPTS, check_versions, requests

from paceline.errors import InvalidInput
from paceline.groups import Completion, Version
from paceline.rollout.engine import Engine, GenerationRequest, SamplingParams
from paceline.spec import RunSpec
from paceline.spec.sections.vllm import ALLOWED, REFUSED

pytestmark = pytest.mark.vllm
TOLERANCE = 2e-5
CHI_SQUARE_Z = 3.09
"""Standard normal deviate that a right sampler exceeds in one of 1,000 tests."""
ALLOWED_VALUES = {
    "async_scheduling": False,
    "block_size": 32,
    "cpu_distributed_timeout_seconds": 600,
    "disable_custom_all_reduce": True,
    "distributed_timeout_seconds": 600,
    "enable_chunked_prefill": False,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 8192,
    "num_gpu_blocks_override": 4096,
    "prefill_schedule_interval": 2,
    "scheduler_reserve_full_isl": False,
    "seed": 7,
    "watermark": 0.01,
}


def speculative(method: str, folder: Path, draft: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        draft.save_pretrained(folder)
        settings["model"] = str(folder)
    return settings


def sampled_logprobs(model: Any, prompt: Any, completion: Completion, temperature: float, top_p: float) -> Any:
    """[T] of the sampler's distribution, from one full forward pass in float64."""
    ids_1L = torch.from_numpy(np.concatenate([prompt, completion.token_ids]).astype(np.int64))[None]
    with torch.no_grad():
        logprobs_LV = (model(ids_1L).logits[0, :-1].double() / temperature).log_softmax(-1)
    ordered_LV, order_LV = logprobs_LV.sort(dim=-1, descending=True)
    before_LV = ordered_LV.exp().cumsum(-1) - ordered_LV.exp()
    dropped_LV = torch.zeros_like(before_LV, dtype=torch.bool).scatter(1, order_LV, before_LV >= top_p)
    logprobs_LV = logprobs_LV.masked_fill(dropped_LV, -torch.inf).log_softmax(-1)
    return logprobs_LV.gather(1, ids_1L[0, 1:, None])[len(prompt) - 1 :, 0].numpy()


async def sampled(engine: Engine, num_tokens: int, **params: float) -> list[Completion]:
    each = SamplingParams(num_tokens, **params)  # type: ignore[arg-type]
    return await asyncio.gather(*(engine.generate(dataclasses.replace(r, params=each)) for r in requests(1)))


def greedy_tokens(model: Any, prompt: Any, num_tokens: int) -> list[int]:
    """Return the likeliest continuation of a prompt by the model alone."""
    prompt_1L = torch.from_numpy(prompt.astype(np.int64))[None]
    mask = torch.ones_like(prompt_1L)
    ids = model.generate(prompt_1L, attention_mask=mask, do_sample=False, max_new_tokens=num_tokens, pad_token_id=0)
    return list(ids[0, len(prompt) :].tolist())


async def check_logprobs(engine: Engine, model: Any) -> None:
    for temperature, top_p in ((1.0, 1.0), (0.7, 0.9)):
        completions = await sampled(engine, 32, temperature=temperature, top_p=top_p)
        expected = [
            sampled_logprobs(model, prompt, completion, temperature, top_p)
            for prompt, completion in zip(PROMPTS, completions, strict=True)
        ]
        off = max(np.abs(c.logprobs - e).max() for c, e in zip(completions, expected, strict=True))
        print(f"temperature {temperature}, top_p {top_p}: largest difference {off:.1e}")
        assert off <= TOLERANCE


async def check_siblings(engine: Any, model: Any, reference_logprobs: Any) -> None:
    """Check that siblings find the blocks of their prompt, which are 128 tokens, and are scored exactly with them."""
    prompt = (np.arange(300) % 23).astype(np.int32)
    siblings = [GenerationRequest(f"g{i}", prompt, SamplingParams(12), seed=i) for i in range(8)]
    before = engine.prefix_hits
    for completion in await asyncio.gather(*map(engine.generate, siblings)):
        assert np.abs(completion.logprobs - reference_logprobs(model, prompt, completion)).max() <= TOLERANCE
    assert engine.prefix_hits - before == 7 * 256


@pytest.mark.parametrize("method", ["ngram", pytest.param("draft_model", marks=pytest.mark.slow)])
async def test_speculation_changes_no_greedy_token_no_logprob_and_no_version(
    method: str,
    start_engine: Callable[[RunSpec], Engine],
    make_spec: Callable[..., RunSpec],
    make_model: Callable[..., Any],
    reference_logprobs: Any,
    tmp_path: Path,
) -> None:
    """The draft model is the policy's first version: its greedy tokens are all accepted then, few of them later."""
    model = make_model()
    settings = speculative(method, tmp_path / "draft", model)
    engine: Any = start_engine(make_spec(model, backend="vllm", max_batch_size=64, vllm_cfg={"speculative": settings}))
    await engine.update_weights(Version(1, 0), model.state_dict())

    greedy = await sampled(engine, 32, temperature=1e-4)
    likeliest = cache(lambda length: greedy_tokens(model, PROMPTS[length - 1], 32))  # prompts of one length are equal
    assert [c.token_ids.tolist() for c in greedy] == [likeliest(len(prompt)) for prompt in PROMPTS]
    drafted, accepted = engine.drafts
    print(f"{method}: {accepted} of {drafted} greedy drafts accepted")
    assert 0 < accepted <= drafted
    if method == "draft_model":
        assert accepted > 0.8 * drafted  # drafts behind the last token of a completion are not accepted

    await check_logprobs(engine, model)
    for penalty in (SamplingParams(16, top_k=5), SamplingParams(16, repetition_penalty=1.3)):
        ended = await asyncio.gather(
            *(engine.generate(dataclasses.replace(r, params=penalty, seed=1)) for r in requests(1)[:4])
        )
        assert all(len(c.token_ids) == 16 for c in ended)
    scored = await engine.prompt_logprobs(np.arange(20, dtype=np.int32))
    assert scored.version == Version(1, 0)
    for name, value in (("min_p", 0.1), ("min_new_tokens", 2)):
        with pytest.raises(InvalidInput, match=f"{name} is {value}, but the run has .*speculative"):
            await sampled(engine, 4, **{name: value})

    await check_siblings(engine, model, reference_logprobs)
    await check_versions(engine, make_model, "qwen3", True, reference_logprobs)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
async def test_ten_thousand_draws_have_the_policys_distribution(
    method: str,
    start_engine: Callable[[RunSpec], Engine],
    make_spec: Callable[..., RunSpec],
    make_model: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Chi-square of the second and third token together, of which drafts decide; the first comes with the prompt."""
    model = make_model()
    # Its likeliest tokens are often others than the policy's.
    settings = speculative(method, tmp_path / "draft", make_model(seed=5)) | {"num_speculative_tokens": 2}
    if method == "ngram":
        settings["prompt_lookup_min"] = 1
    spec = make_spec(model, backend="vllm", max_batch_size=256, vllm_cfg={"speculative": settings})
    engine: Any = start_engine(spec)
    await engine.update_weights(Version(1, 0), model.state_dict())
    prompt = np.arange(46, dtype=np.int32) % 23  # each token has a successor to draft
    params = SamplingParams(3)
    draws = [
        await asyncio.gather(
            *(engine.generate(GenerationRequest(f"d{i}", prompt, params, seed=i)) for i in range(start, start + 500))
        )
        for start in range(0, 10_000, 500)
    ]
    tokens_N3 = np.array([completion.token_ids for some in draws for completion in some])
    vocab = model.config.vocab_size
    pairs = torch.cartesian_prod(torch.arange(vocab), torch.arange(vocab))
    ids = torch.cat([torch.from_numpy(prompt).long().expand(len(pairs), -1), pairs], 1)
    with torch.no_grad():
        probs = model(ids).logits[:, len(prompt) - 1 :].double().softmax(-1)
    first, second = probs[:, 0].gather(1, pairs[:, :1])[:, 0], probs[:, 1].gather(1, pairs[:, 1:])[:, 0]
    expected = ((first * second)[:, None] * probs[:, 2]).view(vocab, vocab, vocab).sum(0).flatten().numpy()
    observed = np.bincount(tokens_N3[:, 1] * vocab + tokens_N3[:, 2], minlength=vocab * vocab)
    often = expected * len(tokens_N3) >= 5
    groups = [(observed[i], expected[i]) for i in np.flatnonzero(often)]
    groups.append((observed[~often].sum(), expected[~often].sum()))
    counts, shares = np.array(groups).T
    chi_square = ((counts - len(tokens_N3) * shares) ** 2 / (len(tokens_N3) * shares)).sum()
    freedom = len(groups) - 1
    # Wilson and Hilferty's cube root (1931) is nearly normal.
    z = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom))
    drafted, accepted = engine.drafts
    print(f"{method}: chi-square {chi_square:.1f} at {freedom} degrees, z {z:.2f}; {accepted} of {drafted} accepted")
    assert 0 < accepted < drafted
    assert z < CHI_SQUARE_Z


def test_every_argument_of_vllm_is_allowed_or_refused() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert fields == ALLOWED.keys() | REFUSED.keys()
    assert not ALLOWED.keys() & REFUSED.keys()
    assert ALLOWED_VALUES.keys() == ALLOWED.keys(), "the next test tries each allowed argument"


@pytest.mark.slow
async def test_log_probabilities_and_versions_are_exact_with_the_allowed_arguments(
    start_engine: Callable[[RunSpec], Engine],
    make_spec: Callable[..., RunSpec],
    make_model: Callable[..., Any],
    reference_logprobs: Any,
) -> None:
    model = make_model()
    engine = start_engine(make_spec(model, backend="vllm", max_batch_size=64, vllm_kwargs=ALLOWED_VALUES))
    await engine.update_weights(Version(1, 0), model.state_dict())
    await check_logprobs(engine, model)
    await check_versions(engine, make_model, "qwen3", True, reference_logprobs)

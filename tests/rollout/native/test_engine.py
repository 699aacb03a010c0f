"""The native engine beyond the contract: architectures, tied weights, shared prefill, stale caches, its death."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch
from gpu_device import gpu_device
from transformers import DynamicCache, LlamaConfig

from paceline.errors import EngineDied, InvalidInput, Unavailable
from paceline.groups import Completion, Version
from paceline.rollout.engine import Engine, GenerationRequest, SamplingParams
from paceline.rollout.engines import create_engine
from paceline.rollout.native.batch import DecodeBatch, RunningSequence
from paceline.rollout.native.model import NativeModel
from paceline.spec import RunSpec

FIRST = Version(1, 0)
PROMPT = np.array([3, 1, 4, 1, 5], np.int32)


def ask(name: str, num_tokens: int = 12, seed: int = 0, prompt: Any = PROMPT) -> GenerationRequest:
    return GenerationRequest(name, prompt, SamplingParams(num_tokens), seed)


def sequence(name: str, num_tokens: int, seed: int = 0, prompt: Any = PROMPT) -> RunningSequence:
    return RunningSequence(ask(name, num_tokens, seed, prompt), frozenset(), len(prompt) + num_tokens)


@pytest.fixture
def batch(make_model: Callable[..., Any]) -> DecodeBatch:
    """over a separate model, since weights are replaced in place."""
    import copy

    batch = DecodeBatch(NativeModel(copy.deepcopy(make_model()), (), 256), 8)
    batch.change_version(FIRST, None)
    return batch


def finish(batch: DecodeBatch) -> dict[str, Completion]:
    ended: list[Any] = []
    while batch.sequences:
        ended += batch.step()
    return {sequence.request.request_id: completion for sequence, completion in ended}


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("drop_head", [True, False])
async def test_architectures_with_tied_and_untied_embeddings(
    make_model: Callable[..., Any],
    make_spec: Callable[..., RunSpec],
    start_engine: Callable[[RunSpec], Engine],
    reference_logprobs: Any,
    architecture: str,
    tied: bool,
    drop_head: bool,
) -> None:
    model = make_model(architecture, tied=tied)
    engine = start_engine(make_spec(model))
    weights = dict(model.state_dict())
    if drop_head:
        del weights["lm_head.weight"]
    if drop_head and not tied:
        with pytest.raises(InvalidInput, match=r"missing weights: lm_head\.weight"):
            await engine.update_weights(FIRST, weights)
        return
    await engine.update_weights(FIRST, weights)
    prompts = [PROMPT, PROMPT[:2], PROMPT[::-1], PROMPT]
    completions = await asyncio.gather(*(engine.generate(ask(str(i), 30 + i, i, p)) for i, p in enumerate(prompts)))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert np.abs(completion.logprobs - reference_logprobs(model, prompt, completion)).max() < 1e-4


async def test_tied_weights_that_differ_are_refused(
    make_model: Callable[..., Any],
    make_spec: Callable[..., RunSpec],
    start_engine: Callable[[RunSpec], Engine],
) -> None:
    engine = start_engine(make_spec(make_model()))
    with pytest.raises(InvalidInput, match=r"'lm_head\.weight' differ"):
        await engine.update_weights(FIRST, make_model(tied=False).state_dict())


async def test_the_models_end_of_sequence_stops(
    make_model: Callable[..., Any],
    make_spec: Callable[..., RunSpec],
    start_engine: Callable[[RunSpec], Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model()
    engine = start_engine(make_spec(model))
    await engine.update_weights(FIRST, model.state_dict())
    free = await engine.generate(ask("a", 40))
    monkeypatch.setattr(model.config, "eos_token_id", [21, int(free.token_ids[7])])
    engine = start_engine(make_spec(model))
    await engine.update_weights(FIRST, model.state_dict())
    stopped = await engine.generate(ask("a", 40))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids.tolist() == free.token_ids[: len(stopped.token_ids)].tolist()
    assert len(stopped.token_ids) <= 8


async def test_loaded_weights_serve_at_once(
    make_model: Callable[..., Any], make_spec: Callable[..., RunSpec], tmp_path: Any, reference_logprobs: Any
) -> None:
    model = make_model()
    spec = make_spec(model)
    model.save_pretrained(tmp_path)
    engine = create_engine(spec, load_weights=True)
    try:
        assert engine.version == Version(0, 0)
        completion = await engine.generate(ask("a"))
    finally:
        await engine.close()
    assert np.abs(completion.logprobs - reference_logprobs(model, PROMPT, completion)).max() < 1e-4


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
async def test_the_vllm_backend_says_how_to_get_it(
    make_model: Callable[..., Any], make_spec: Callable[..., RunSpec]
) -> None:
    with pytest.raises(InvalidInput, match="pip install"):
        create_engine(make_spec(make_model(), backend="vllm"))


def test_a_window_in_unknown_layers_is_refused(
    make_spec: Callable[..., RunSpec], make_model: Callable[..., Any], tmp_path: Any
) -> None:
    spec = make_spec(make_model())
    LlamaConfig(sliding_window=16).save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match="llama, which does not say which layers have its window of 16 tokens"):
        create_engine(spec)


@torch.inference_mode()
def test_equal_prompts_are_computed_once_and_only_their_last_position_reaches_the_head(
    batch: DecodeBatch,
) -> None:
    module = batch.model.module
    embedded: list[tuple[int, ...]] = []
    headed: list[tuple[int, ...]] = []
    module.get_input_embeddings().register_forward_hook(lambda _m, inputs, _o: embedded.append(inputs[0].shape))
    module.get_output_embeddings().register_forward_hook(lambda _m, inputs, _o: headed.append(inputs[0].shape))
    batch.add([sequence("a", 5, 1), sequence("b", 5, 2, PROMPT[:3]), sequence("c", 5, 3), sequence("d", 5, 4)])
    assert embedded == [(2, 5)]
    assert headed == [(2, 1, 32)]
    together = finish(batch)
    for name, seed, prompt in [("a", 1, PROMPT), ("b", 2, PROMPT[:3]), ("c", 3, PROMPT), ("d", 4, PROMPT)]:
        batch.add([sequence(name, 5, seed, prompt)])
        alone = finish(batch)[name]
        assert alone.token_ids.tolist() == together[name].token_ids.tolist()


@torch.inference_mode()
def test_rows_join_a_running_batch_without_changing_it(batch: DecodeBatch) -> None:
    batch.add([sequence("a", 100, 1)])
    alone = finish(batch)["a"]
    batch.add([sequence("short", 3, 9), sequence("a", 100, 1)])
    ended = {}
    for step in range(70):
        ended |= {r.request.request_id: c for r, c in batch.step()}
        if step % 10 == 0:
            ended |= {r.request.request_id: c for r, c in batch.add([sequence(f"j{step}", 4, step, PROMPT[:2])])}
    assert {"short", "j0", "j60"} <= ended.keys()
    together = finish(batch)["a"]
    assert together.token_ids.tolist() == alone.token_ids.tolist()
    np.testing.assert_allclose(together.logprobs, alone.logprobs, atol=1e-4)


@torch.inference_mode()
def test_a_row_that_ends_with_its_first_token_leaves_at_once(batch: DecodeBatch) -> None:
    batch.add([sequence("long", 10)])
    ended = batch.add([sequence("one", 1)])
    assert [(r.request.request_id, len(c.token_ids)) for r, c in ended] == [("one", 1)]
    assert [r.request.request_id for r in batch.sequences] == ["long"]


@torch.inference_mode()
def test_without_recomputation_new_weights_see_the_old_keys_and_values(
    batch: DecodeBatch, make_model: Callable[..., Any]
) -> None:
    old, new = make_model(), make_model(seed=1)
    batch.add([sequence("a", 20)])
    for _ in range(7):
        batch.step()
    batch.model.replace(new.state_dict())
    batch.change_version(Version(1, 1), None)
    completion = finish(batch)["a"]
    assert [(span.step, span.start, span.end) for span in completion.spans] == [(0, 0, 8), (1, 8, 20)]
    ids = torch.from_numpy(np.concatenate([PROMPT, completion.token_ids]).astype(np.int64))[None]
    # 5 of the prompt and 8 sampled: the eighth has no keys yet when the weights change.
    cache = DynamicCache(config=old.config)
    old(ids[:, :12], past_key_values=cache)
    logits = new(ids[:, 12:-1], past_key_values=cache).logits[0]
    expected = logits.log_softmax(-1).gather(1, ids[0, 13:, None])[:, 0].numpy()
    np.testing.assert_allclose(completion.logprobs[8:], expected, atol=1e-4)


@torch.inference_mode()
def test_recomputation_in_several_passes(
    batch: DecodeBatch,
    make_model: Callable[..., Any],
    reference_logprobs: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.rollout.native.batch.PREFILL_TOKENS", 40)
    new = make_model(seed=1)
    prompts = {str(i): np.arange(3 + i, dtype=np.int32) for i in range(8)}
    batch.add([sequence(name, 20, i, prompt) for i, (name, prompt) in enumerate(prompts.items())])
    for _ in range(7):
        batch.step()
    batch.model.replace(new.state_dict())
    batch.change_version(Version(1, 1), 1)
    for name, completion in finish(batch).items():
        expected = reference_logprobs(new, prompts[name], completion)
        np.testing.assert_allclose(completion.logprobs[8:], expected[8:], atol=1e-4)


@torch.inference_mode()
def test_keys_and_values_are_renewed_when_they_are_old_enough(
    batch: DecodeBatch, make_model: Callable[..., Any], reference_logprobs: Any
) -> None:
    models = [make_model(seed=seed) for seed in (1, 2, 3)]
    prompts = {"early": PROMPT, "late": PROMPT[:3]}
    batch.add([sequence("early", 40, 1, prompts["early"])])
    for step, model in enumerate(models, start=1):
        for _ in range(4):
            batch.step()
        if step == 2:
            batch.add([sequence("late", 40, 2, prompts["late"])])
        batch.model.replace(model.state_dict())
        batch.change_version(Version(1, step), 2)
    for name, renewed_at in (("early", 2), ("late", 3)):
        assert {each.request.request_id: each.computed_at for each in batch.sequences}[name] == renewed_at + 1
    completions = finish(batch)
    # Renewed at the second change, kept at the third; joined before the second, renewed at the third.
    for name, step, is_exact in (
        ("early", 2, True),
        ("early", 3, False),
        ("late", 2, False),
        ("late", 3, True),
    ):
        completion, model = completions[name], models[step - 1]
        (span,) = [span for span in completion.spans if span.step == step]
        off = np.abs(completion.logprobs - reference_logprobs(model, prompts[name], completion))
        assert (off[span.start : span.end].max() < 1e-4) == is_exact, (name, step)


@pytest.mark.parametrize("recompute", [True, False])
async def test_the_spec_says_whether_keys_and_values_are_recomputed(
    make_model: Callable[..., Any],
    make_spec: Callable[..., RunSpec],
    start_engine: Callable[[RunSpec], Engine],
    reference_logprobs: Any,
    until: Any,
    recompute: bool,
) -> None:
    old, new = make_model(), make_model(seed=1)
    spec = make_spec(old, async_grpo={"recompute_kv_cache_after_weight_updates": recompute})
    engine = start_engine(spec)
    await engine.update_weights(FIRST, old.state_dict())
    running = asyncio.create_task(engine.generate(ask("running", 2000, 1)))
    await until(lambda: engine.num_running == 1)
    await engine.update_weights(Version(1, 1), new.state_dict())
    # A prompt that was computed under the old weights is computed again under the new ones, in any mode.
    again = await engine.generate(ask("again", 10, 2))
    assert np.abs(again.logprobs - reference_logprobs(new, PROMPT, again)).max() < 1e-4
    engine.abort("running")
    completion = await running
    assert [span.step for span in completion.spans] == [FIRST.step, 1]
    start = completion.spans[1].start
    off = np.abs(completion.logprobs - reference_logprobs(new, PROMPT, completion))[start:].max()
    assert (off < 1e-4) == recompute


async def test_logits_that_overflow_fail_their_requests_and_leave_nothing_behind(
    make_model: Callable[..., Any],
    make_spec: Callable[..., RunSpec],
    start_engine: Callable[[RunSpec], Engine],
) -> None:
    model = make_model()
    engine = start_engine(make_spec(model))

    async def two() -> list[Any]:
        requests = [ask("long", 40, 1, np.resize(PROMPT, 30)), ask("short", 40, 2, PROMPT[:2])]
        return await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)

    await engine.update_weights(FIRST, model.state_dict())
    before = await two()
    weights = dict(model.state_dict())
    weights["model.layers.0.self_attn.v_proj.weight"] = weights["model.layers.0.self_attn.v_proj.weight"] * 1e38
    await engine.update_weights(Version(1, 1), weights)
    for failure in await two():
        assert isinstance(failure, Unavailable)
        assert "step=1) are not finite" in str(failure)
    await engine.update_weights(Version(1, 2), model.state_dict())
    for now, then in zip(await two(), before, strict=True):
        assert now.token_ids.tolist() == then.token_ids.tolist()


class LostBuffer(dict[str, torch.Tensor]):
    """Weights that pass every check but are gone when they are copied."""

    def __getitem__(self, name: str) -> torch.Tensor:
        raise RuntimeError("the receive buffer is gone")


async def test_when_the_thread_dies_everyone_is_told_why(
    make_model: Callable[..., Any],
    make_spec: Callable[..., RunSpec],
    until: Callable[[Callable[[], bool]], Awaitable[None]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make_model()
    engine = create_engine(make_spec(model))
    await engine.update_weights(FIRST, model.state_dict())
    running = asyncio.create_task(engine.generate(ask("a", 4000)))
    await until(lambda: engine.num_running == 1)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    for attempt in (
        engine.update_weights(Version(1, 1), LostBuffer(weights)),
        running,
        engine.generate(ask("b")),
        engine.update_weights(Version(1, 2), weights),
    ):
        with pytest.raises(EngineDied, match="the receive buffer is gone"):
            await attempt
    assert "the native engine died" in caplog.text
    await engine.close()


@pytest.mark.gpu
async def test_on_a_gpu_in_bfloat16(
    make_model: Callable[..., Any], make_spec: Callable[..., RunSpec], reference_logprobs: Any
) -> None:
    model = make_model()
    engine = create_engine(make_spec(model), device=gpu_device().type)
    try:
        await engine.update_weights(FIRST, model.state_dict())
        completions = await asyncio.gather(*(engine.generate(ask(str(i), 60, i)) for i in range(16)))
    finally:
        await engine.close()
    for completion in completions:
        difference = np.abs(completion.logprobs - reference_logprobs(model, PROMPT, completion))
        assert difference.mean() < 0.1

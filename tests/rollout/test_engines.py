"""Promises of every engine to its callers. Each test runs once for each engine."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import InvalidInput, PacelineError, PromptTooLong, Unavailable, WireError
from paceline.groups import Completion, Version, VersionSpan
from paceline.rollout.engine import Engine, GenerationRequest, SamplingParams
from paceline.rollout.stop_strings import StopStrings, cut
from paceline.spec import RunSpec
from paceline.weights.hosts.host_weights import HostWeights, SegmentPair, State

ENDLESS = 4000
"""More tokens than any test waits for: it aborts or closes, so no outcome depends on the engine's speed."""
FIRST = Version(1, 0)
PROMPT = np.array([3, 1, 4, 1, 5], np.int32)
LETTERS = "abcdefghijklmnopqrstuvw"
"""Text of each token."""

Until = Callable[[Callable[[], bool]], Awaitable[None]]


@pytest.fixture(params=["native", pytest.param("vllm", marks=pytest.mark.vllm)])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(make_model: Callable[..., Any]) -> Any:
    return make_model()


@pytest.fixture
def spec(make_spec: Callable[..., RunSpec], model: Any, backend: str) -> RunSpec:
    return make_spec(model, backend=backend)


@pytest.fixture
async def engine(
    request: pytest.FixtureRequest,
    start_engine: Callable[[RunSpec], Engine],
    spec: RunSpec,
    backend: str,
    model: Any,
) -> Engine:
    """An engine with the weights of FIRST; the vLLM engine has served other tests before."""
    engine: Engine = request.getfixturevalue("vllm_engine")() if backend == "vllm" else start_engine(spec)
    await engine.update_weights(FIRST, model.state_dict())
    return engine


def ask(name: str, num_tokens: int = 12, seed: int = 0, prompt: Any = PROMPT, **more: Any) -> GenerationRequest:
    prefix = more.pop("prefix", None)
    return GenerationRequest(name, prompt, SamplingParams(num_tokens, **more), seed, prefix)


def same(first: Completion, second: Completion) -> bool:
    return first.token_ids.tolist() == second.token_ids.tolist() and bool(
        np.allclose(first.logprobs, second.logprobs, atol=1e-4)
    )


async def test_logprobs_equal_a_plain_forward_pass(engine: Engine, model: Any, reference_logprobs: Any) -> None:
    for temperature in (1.0, 0.6):
        completion = await engine.generate(ask("a", 100, temperature=temperature))
        expected = reference_logprobs(model, PROMPT, completion, temperature)
        assert np.abs(completion.logprobs - expected).max() < 1e-4
        assert completion.finish_reason == "length"
        assert completion.spans == (VersionSpan(1, 0, 0, 100),)
        assert completion.text == ""


async def test_a_temperature_near_zero_is_greedy_decoding(engine: Engine, model: Any) -> None:
    import torch

    completion = await engine.generate(ask("a", 40, temperature=1e-4))
    prompt = torch.from_numpy(PROMPT.astype(np.int64))[None]
    greedy = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=40, pad_token_id=0
    )
    assert completion.token_ids.tolist() == greedy[0, len(PROMPT) :].tolist()
    assert np.abs(completion.logprobs).max() < 1e-4
    for seed in range(8):
        assert same(await engine.generate(ask(str(seed), 40, seed=seed, temperature=1e-4)), completion)


async def test_first_tokens_follow_the_softmax(engine: Engine, model: Any, reference_logprobs: Any) -> None:
    n = 3000
    completions = await asyncio.gather(*(engine.generate(ask(str(i), 1, seed=i)) for i in range(n)))
    counts_V = np.bincount([int(c.token_ids[0]) for c in completions], minlength=23)
    probabilities_V = np.exp(
        [
            reference_logprobs(model, PROMPT, Completion(np.array([t], np.int32), np.zeros(1, np.float32), (), ""))
            for t in range(23)
        ]
    )[:, 0]
    # Tokens that are expected less than five times count as one, so that the chi-square applies.
    rare = n * probabilities_V < 5
    observed = np.append(counts_V[~rare], counts_V[rare].sum())
    expected = n * np.append(probabilities_V[~rare], probabilities_V[rare].sum())
    # Chi-square with at most 22 degrees of freedom: 48.3 has p = 0.001.
    assert ((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum() < 48.3


async def test_tokens_depend_on_the_seed_and_not_on_the_batch(engine: Engine) -> None:
    alone = await engine.generate(ask("alone", 90, seed=5))
    other = await engine.generate(ask("other", 90, seed=6))
    assert alone.token_ids.tolist() != other.token_ids.tolist()
    prompts = [np.arange(1 + i % 7, dtype=np.int32) for i in range(20)]
    crowd = await asyncio.gather(
        *(engine.generate(ask(f"c{i}", 3 + 11 * i % 80, seed=i, prompt=p)) for i, p in enumerate(prompts)),
        engine.generate(ask("again", 90, seed=5)),
    )
    assert same(crowd[-1], alone)
    for i, prompt in enumerate(prompts):
        solo = await engine.generate(ask(f"s{i}", 3 + 11 * i % 80, seed=i, prompt=prompt))
        assert same(crowd[i], solo)


async def test_top_k_and_top_p_are_in_tokens_and_logprobs(engine: Engine) -> None:
    completion = await engine.generate(ask("a", 30, top_k=1))
    assert completion.logprobs.tolist() == [0.0] * 30
    greedy = await engine.generate(ask("b", 30, temperature=1e-4))
    assert completion.token_ids.tolist() == greedy.token_ids.tolist()
    nucleus = await engine.generate(ask("c", 30, top_p=1e-6))
    assert nucleus.token_ids.tolist() == greedy.token_ids.tolist()


async def test_a_stop_token_ends_and_is_kept_and_min_new_tokens_holds_it_off(engine: Engine) -> None:
    free = await engine.generate(ask("a", 60))
    stop = int(free.token_ids[10])
    first = free.token_ids.tolist().index(stop)
    stopped = await engine.generate(ask("b", 60, stop_token_ids=(stop, 9999)))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids.tolist() == free.token_ids[: first + 1].tolist()
    held = await engine.generate(ask("c", 60, stop_token_ids=(stop,), min_new_tokens=30))
    assert stop not in held.token_ids[:30].tolist()
    assert len(held.token_ids) >= 30


async def test_a_stop_string_ends_with_the_token_that_completes_it_while_others_go_on(
    engine: Engine, model: Any, reference_logprobs: Any, backend: str
) -> None:
    free = await asyncio.gather(*(engine.generate(ask(f"free{i}", 40, seed=i)) for i in range(4)))
    wanted = "".join(LETTERS[i] for i in free[0].token_ids[6:9])
    stop = StopStrings((wanted,), lambda ids: "".join(LETTERS[i] for i in ids))
    requests = [dataclasses.replace(ask(f"s{i}", 40, seed=i), stop=stop) for i in range(4)]
    late = dataclasses.replace(ask("late", 40, min_new_tokens=len(free[0].token_ids)), stop=stop)
    *stopped, long = await asyncio.gather(*(engine.generate(request) for request in [*requests, late]))
    for before, now in zip(free, stopped, strict=True):
        text = "".join(LETTERS[i] for i in before.token_ids)
        length = text.find(wanted) + len(wanted) if wanted in text else len(text)
        assert same(now, cut(before, length)) or (wanted not in text and same(now, before))
    assert stopped[0].finish_reason == "stop"
    assert len(stopped[0].token_ids) <= 9
    assert np.abs(stopped[0].logprobs - reference_logprobs(model, PROMPT, stopped[0])).max() < 1e-4
    assert len(long.token_ids) == len(free[0].token_ids)
    prefix = dataclasses.replace(cut(stopped[0], len(stopped[0].token_ids) - 1), finish_reason="abort")
    again = await engine.generate(dataclasses.replace(requests[0], request_id="on", prefix=prefix))
    if backend == "native":  # vllm draws other numbers after a prefix
        assert again.finish_reason == "stop"
        assert same(again, stopped[0])


async def test_min_p_and_repetition_penalty_are_in_tokens_and_logprobs(engine: Engine) -> None:
    likeliest = await engine.generate(ask("a", 20, min_p=0.999))
    assert np.abs(likeliest.logprobs).max() < 0.7  # few tokens, mostly one, are left
    once = await engine.generate(ask("b", 12, temperature=1e-4, repetition_penalty=1e6))
    assert len({*PROMPT.tolist(), *once.token_ids.tolist()}) == len(set(PROMPT.tolist())) + 12


async def test_the_models_length_ends_a_completion(engine: Engine) -> None:
    completion = await engine.generate(ask("a", 50, prompt=np.ones(4084, np.int32)))
    assert (len(completion.token_ids), completion.finish_reason) == (12, "length")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask("a", prompt=np.empty(0, np.int32)), "0 tokens"),
        (ask("a", prompt=np.ones(4096, np.int32)), "4096 tokens, but must have 1 to 4095"),
        (ask("a", prompt=np.array([1, 23], np.int32)), "1 to 23"),
        (ask("a", prefix=Completion(np.ones(1, np.int32), np.zeros(1, np.float32), (), "abort")), "spans"),
        (ask("a", prefix=Completion(np.empty(0, np.int32), np.empty(0, np.float32), (), "stop")), "'stop'"),
    ],
)
async def test_bad_requests_are_refused_and_harm_nobody(
    engine: Engine, request_: GenerationRequest, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message) as refused:
        await engine.generate(request_)
    assert isinstance(refused.value, PromptTooLong) == ("4096 tokens" in message)
    assert len((await engine.generate(ask("a"))).token_ids) == 12


async def test_an_id_in_use_is_refused(engine: Engine, until: Until) -> None:
    first = asyncio.create_task(engine.generate(ask("a", ENDLESS)))
    await until(lambda: engine.num_running == 1)
    with pytest.raises(InvalidInput, match="'a' is in use"):
        await engine.generate(ask("a"))
    engine.abort("a")
    assert (await first).finish_reason == "abort"


async def test_abort_returns_what_exists_and_a_prefix_goes_on_from_it(
    engine: Engine, until: Until, backend: str, model: Any, reference_logprobs: Any
) -> None:
    task = asyncio.create_task(engine.generate(ask("a", ENDLESS, seed=3)))
    await until(lambda: engine.num_running == 1)
    engine.abort("a")
    part = await task
    assert part.finish_reason == "abort"
    assert 0 < len(part.token_ids) < ENDLESS
    num_tokens = len(part.token_ids) + 20
    whole = await engine.generate(ask("whole", num_tokens, seed=3))
    assert part.token_ids.tolist() == whole.token_ids[:-20].tolist()
    rest = await engine.generate(ask("b", num_tokens, seed=3, prefix=part))
    assert (rest.spans, rest.finish_reason) == (whole.spans, "length")
    if backend == "native":
        assert same(rest, whole)
    else:  # other random numbers after the prefix, of the same distribution
        assert rest.token_ids[:-20].tolist() == part.token_ids.tolist()
        expected = reference_logprobs(model, PROMPT, rest)
        assert np.abs(rest.logprobs - expected).max() < 1e-4


async def test_a_prefix_keeps_its_versions_and_numbers(engine: Engine, backend: str) -> None:
    whole = await engine.generate(ask("whole", 20, seed=3))
    old = np.full(8, -7.5, np.float32)
    prefix = Completion(whole.token_ids[:8], old, (VersionSpan(0, 7, 0, 5), VersionSpan(0, 8, 5, 8)), "abort")
    rest = await engine.generate(ask("b", 20, seed=3, prefix=prefix))
    assert rest.token_ids[:8].tolist() == whole.token_ids[:8].tolist()
    if backend == "native":
        assert rest.token_ids.tolist() == whole.token_ids.tolist()
    assert rest.logprobs[:8].tolist() == old.tolist()
    assert rest.spans == (*prefix.spans, VersionSpan(1, 0, 8, 20))
    others = dataclasses.replace(prefix, spans=(VersionSpan(1, 0, 0, 8, "rollout-1"),))
    rest = await engine.generate(ask("d", 20, seed=3, prefix=others))
    assert rest.spans == (*others.spans, VersionSpan(1, 0, 8, 20))
    full = Completion(whole.token_ids, whole.logprobs, whole.spans, "abort")
    assert (await engine.generate(ask("c", 20, prefix=full))).finish_reason == "length"


async def test_abort_of_a_waiting_request_and_of_an_unknown_one(engine: Engine, until: Until) -> None:
    tasks = [asyncio.create_task(engine.generate(ask(str(i), ENDLESS, seed=i))) for i in range(9)]
    await until(lambda: (engine.num_running, engine.num_waiting) == (8, 1))
    engine.abort("8")
    engine.abort("nobody")
    waiting = await tasks[8]
    assert (len(waiting.token_ids), waiting.spans, waiting.finish_reason) == (0, (), "abort")
    assert engine.num_running == 8
    for i in range(8):
        engine.abort(str(i))
    assert all([len((await task).token_ids) > 0 for task in tasks[:8]])


async def test_cancelling_frees_the_row_and_the_id(engine: Engine, until: Until) -> None:
    task = asyncio.create_task(engine.generate(ask("a", ENDLESS)))
    await until(lambda: engine.num_running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    again = asyncio.create_task(engine.generate(ask("a", 5)))
    assert len((await again).token_ids) == 5
    await until(lambda: engine.num_running == 0)


async def test_every_token_has_the_logprob_of_its_own_version(
    engine: Engine, make_model: Callable[..., Any], until: Until, reference_logprobs: Any
) -> None:
    models = {0: make_model(), 1: make_model(seed=1), 2: make_model(seed=2)}
    tasks = [asyncio.create_task(engine.generate(ask(str(i), ENDLESS, seed=i))) for i in range(3)]
    await until(lambda: engine.num_running == 3)
    for step in (1, 2):
        assert await engine.update_weights(Version(1, step), models[step].state_dict()) > 0
    for i in range(3):
        engine.abort(str(i))
    completions = [await task for task in tasks]
    for completion in completions:
        assert [span.step for span in completion.spans] == [0, 1, 2]
        assert completion.spans[-1].end == len(completion.token_ids)
        assert [span.start for span in completion.spans] == [0, *(span.end for span in completion.spans[:-1])]
        for span in completion.spans:
            expected = reference_logprobs(models[span.step], PROMPT, completion)
            assert np.abs(completion.logprobs - expected)[span.start : span.end].max() < 1e-4


async def test_without_weights_it_refuses_and_without_in_flight_updates_a_swap_waits_for_the_running(
    start_engine: Callable[[RunSpec], Engine],
    make_spec: Callable[..., RunSpec],
    make_model: Callable[..., Any],
    backend: str,
    until: Until,
) -> None:
    spec = make_spec(make_model(), backend=backend, async_grpo={"in_flight_weight_updates": False})
    engine = start_engine(spec)
    assert engine.version is None
    with pytest.raises(Unavailable, match="no weights"):
        await engine.generate(ask("early"))
    assert await engine.update_weights(FIRST, make_model().state_dict()) > 0
    assert engine.version == FIRST
    before = asyncio.create_task(engine.generate(ask("before", 400)))
    await until(lambda: engine.num_running == 1)
    update = asyncio.create_task(engine.update_weights(Version(1, 1), make_model(seed=1).state_dict()))
    await update
    after = await engine.generate(ask("after", 20))
    assert (await before).spans == (VersionSpan(1, 0, 0, 400),)
    assert after.spans == (VersionSpan(1, 1, 0, 20),)


@pytest.mark.parametrize(
    ("state", "value", "error", "message"),
    [
        ("received", 1.5, WireError, "tensor 'model.norm.weight' arrived with xxh3_64"),
        ("received", float("nan"), WireError, "tensor 'model.norm.weight' arrived with xxh3_64"),
        ("compared", float("nan"), InvalidInput, "weight 'model.norm.weight' has NaN"),
    ],
)
async def test_weights_in_a_segment_are_verified_before_any_is_loaded(
    engine: Engine,
    make_model: Callable[..., Any],
    reference_logprobs: Callable[..., Any],
    state: State,
    value: float,
    error: type[PacelineError],
    message: str,
) -> None:
    before = await engine.generate(ask("a"))
    new, segments = make_model(seed=1), SegmentPair()
    damaged = HostWeights.packed(new.state_dict(), segments, 0)
    damaged.state = state
    damaged["model.norm.weight"][3] = value
    with pytest.raises(error, match=message):
        await engine.update_weights(Version(1, 1), damaged)
    assert engine.version == FIRST
    assert (await engine.generate(ask("b"))).logprobs.tolist() == before.logprobs.tolist()
    segments.release(damaged.segment)
    whole = HostWeights.packed(new.state_dict(), segments, 0)
    assert whole.segment is damaged.segment
    await engine.update_weights(Version(1, 1), whole)
    after = await engine.generate(ask("c"))
    assert after.spans[0][:2] == (1, 1)
    assert np.abs(after.logprobs - reference_logprobs(new, PROMPT, after)).max() <= 2e-5


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "missing weights: model.norm.weight"),
        (lambda weights: weights.update(extra=weights["model.norm.weight"]), "unknown weights: extra"),
        (
            lambda weights: weights.update({"model.norm.weight": weights["model.norm.weight"][:3]}),
            r"'model.norm.weight' has shape \(3,\), but the model's has \(32,\)",
        ),
        (
            lambda weights: weights.update({"model.norm.weight": weights["model.norm.weight"] * float("nan")}),
            "'model.norm.weight' has NaN",
        ),
    ],
)
async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve(
    engine: Engine, make_model: Callable[..., Any], damage: Callable[[Any], Any], message: str
) -> None:
    before = await engine.generate(ask("a"))
    weights = dict(make_model(seed=1).state_dict())
    damage(weights)
    with pytest.raises(InvalidInput, match=message):
        await engine.update_weights(Version(1, 1), weights)
    assert engine.version == FIRST
    assert same(await engine.generate(ask("b")), before)


async def test_progress_tells_what_exists_so_far_and_changes_nothing(engine: Engine) -> None:
    silent = await engine.generate(ask("silent", 30, seed=3))
    told: list[Completion] = []
    crowd = [asyncio.create_task(engine.generate(ask(f"crowd {i}", 60, seed=9 + i))) for i in range(3)]
    request = ask("loud", 30, seed=3)
    loud = await engine.generate(dataclasses.replace(request, on_progress=told.append))
    await asyncio.gather(*crowd)
    assert same(loud, silent)
    assert told
    lengths = [len(completion.token_ids) for completion in told]
    assert lengths == sorted(set(lengths))
    assert lengths[-1] <= 30
    for completion in told:
        num_tokens = len(completion.token_ids)
        assert completion.finish_reason == "abort"
        assert completion.token_ids.tolist() == loud.token_ids[:num_tokens].tolist()
        assert np.allclose(completion.logprobs, loud.logprobs[:num_tokens], atol=1e-6)
        assert completion.spans == (VersionSpan(1, 0, 0, num_tokens),)


async def test_an_abort_from_progress_ends_the_request(engine: Engine) -> None:
    def enough(completion: Completion) -> None:
        if len(completion.token_ids) >= 5:
            engine.abort("watched")

    request = dataclasses.replace(ask("watched", ENDLESS), on_progress=enough)
    ended = await engine.generate(request)
    assert ended.finish_reason == "abort"
    assert 5 <= len(ended.token_ids) < ENDLESS


@pytest.mark.parametrize("recompute", [True, False, 2])
async def test_equal_prompts_share_their_computation_within_a_version_only(
    request: pytest.FixtureRequest,
    recompute: bool | int,
    start_engine: Callable[[RunSpec], Engine],
    make_spec: Callable[..., RunSpec],
    make_model: Callable[..., Any],
    reference_logprobs: Any,
    backend: str,
    until: Until,
) -> None:
    models = [make_model(seed=seed) for seed in range(5)]
    settings = {"recompute_kv_cache_after_weight_updates": recompute}
    engine: Any
    if backend == "vllm" and recompute is True:  # the default
        engine = request.getfixturevalue("vllm_engine")()
    else:
        engine = start_engine(make_spec(models[0], backend=backend, async_grpo=settings))
    prompt = (np.arange(300) % 23).astype(np.int32)
    running: list[asyncio.Task[Completion]] = []
    for step, model in enumerate(models):
        await engine.update_weights(Version(1, step), model.state_dict())
        for attempt in range(2):
            before = engine.prefix_hits
            greedy = await engine.generate(ask("greedy", prompt=prompt, top_k=1))
            sampled = await engine.generate(ask("sampled", seed=attempt, prompt=prompt))
            assert greedy.token_ids.tolist() == greedy_tokens(model, prompt, 12)
            assert np.abs(sampled.logprobs - reference_logprobs(model, prompt, sampled)).max() < 1e-4
            assert sampled.spans == (VersionSpan(1, step, 0, 12),)
            assert engine.prefix_hits - before >= 256 * (1 + attempt)
        # Keeps keys and values of this version alive while the next ones serve.
        running.append(asyncio.create_task(engine.generate(ask(f"long-{step}", ENDLESS, prompt=prompt))))
        await until(lambda: engine.num_running == len(running))
    for step in range(len(models)):
        engine.abort(f"long-{step}")
    await asyncio.gather(*running)


def greedy_tokens(model: Any, prompt: Any, num_tokens: int) -> list[int]:
    """The likeliest continuation, each token by a plain forward pass over everything before it."""
    ids = prompt.tolist()
    for _ in range(num_tokens):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


async def test_close_returns_what_exists_and_refuses_more(engine: Engine, until: Until) -> None:
    tasks = [asyncio.create_task(engine.generate(ask(str(i), ENDLESS, seed=i))) for i in range(10)]
    await until(lambda: (engine.num_running, engine.num_waiting) == (8, 2))
    await engine.close()
    completions = [await task for task in tasks]
    assert {completion.finish_reason for completion in completions} == {"abort"}
    assert [len(completion.token_ids) > 0 for completion in completions] == [True] * 8 + [False] * 2
    with pytest.raises(Unavailable, match="closed"):
        await engine.generate(ask("late"))
    await engine.close()

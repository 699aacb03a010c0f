"""Engines under a LoRA run: they sample from the merged model, version by version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from paceline.errors import InvalidInput
from paceline.groups import Version
from paceline.rollout.engine import Engine, GenerationRequest, SamplingParams
from paceline.rollout.engines import create_engine
from paceline.rollout.vllm.engine import MergedAdapter
from paceline.spec import LoraSection, RunSpec
from paceline.weights.format.lora_names import FINGERPRINT, fingerprint
from paceline.weights.model_layout import meta_layout, read_config

# PeftModel, the reference here, uses an old name of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

PROMPT = np.array([3, 1, 4, 1, 5], np.int32)
DIM, ALPHA = 4, 6


@pytest.fixture(
    params=[("native", True), ("native", False), pytest.param(("vllm", True), marks=pytest.mark.vllm)],
    ids=["native-tied", "native-untied", "vllm-tied"],
)
def kind(request: pytest.FixtureRequest) -> Any:
    """(engine, whether the model's embeddings are tied)."""
    return request.param


@pytest.fixture
def model(kind: Any, make_model: Callable[..., Any]) -> Any:
    return make_model(tied=kind[1])


@pytest.fixture(scope="module")
def lora_spec(make_spec_in: Callable[[Path], Callable[..., RunSpec]]) -> Callable[..., RunSpec]:
    """`lora_spec(folder, model, backend, **policy)`. The whole base is saved, because the engine reads it from there."""

    def make(folder: Path, model: Any, backend: str = "native", **policy: Any) -> RunSpec:
        spec = make_spec_in(folder)(model, backend=backend)
        model.save_pretrained(folder)
        lora = LoraSection(enabled=True, dim=DIM, alpha=ALPHA)
        return spec.model_copy(update={"policy": spec.policy.model_copy(update={"lora_cfg": lora, **policy})})

    return make


@pytest.fixture(scope="module")
def vllm_engine(
    make_model: Callable[..., Any], lora_spec: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Engine of the whole module, because its start takes long."""
    engine = create_engine(lora_spec(tmp_path_factory.mktemp("vllm"), make_model(), "vllm"))
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def engine(
    request: pytest.FixtureRequest,
    start_engine: Callable[[RunSpec], Engine],
    lora_spec: Any,
    kind: Any,
    model: Any,
    tmp_path: Path,
) -> Engine:
    if kind[0] == "vllm":
        return request.getfixturevalue("vllm_engine")  # type: ignore[no-any-return]
    return start_engine(lora_spec(tmp_path, model))


def make_adapter(model: Any, seed: int, targets: Any = "all-linear") -> tuple[dict[str, torch.Tensor], Any]:
    """(the adapter that a learner would publish, the model with that adapter merged by peft)."""
    import copy

    config = LoraConfig(r=DIM, lora_alpha=ALPHA, target_modules=targets)
    adapted: Any = get_peft_model(copy.deepcopy(model), config)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {FINGERPRINT: fingerprint(model.state_dict())}
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            tensors[name.replace(".default.", ".")] = parameter.data.clone()
    assert isinstance(adapted, PeftModel)
    return tensors, adapted.merge_and_unload().eval()


def ask(name: str, num_tokens: int = 60, seed: int = 0) -> GenerationRequest:
    return GenerationRequest(name, PROMPT, SamplingParams(num_tokens), seed)


async def test_the_output_is_the_merged_models(engine: Engine, model: Any, reference_logprobs: Any) -> None:
    adapter, merged = make_adapter(model, 1)
    await engine.update_weights(Version(1, 0), adapter)
    completion = await engine.generate(ask("a"))
    assert np.abs(completion.logprobs - reference_logprobs(merged, PROMPT, completion)).max() < 1e-4
    assert np.abs(completion.logprobs - reference_logprobs(model, PROMPT, completion)).max() > 1e-2


async def test_adapters_leave_no_trace_in_each_other(engine: Engine, model: Any) -> None:
    first, _ = make_adapter(model, 1)
    second, _ = make_adapter(model, 2, ["q_proj", "gate_proj"])
    seen = []
    for step, adapter in enumerate((first, second, first, second)):
        await engine.update_weights(Version(1, step), adapter)
        seen.append(await engine.generate(ask(str(step))))
    for one, other in ((0, 2), (1, 3)):
        assert seen[one].token_ids.tolist() == seen[other].token_ids.tolist()
        assert np.allclose(seen[one].logprobs, seen[other].logprobs, rtol=0, atol=1e-6)
    assert not np.allclose(seen[0].logprobs, seen[1].logprobs, rtol=0, atol=1e-2)


async def test_it_is_swapped_between_two_decode_steps_of_a_running_sequence(
    engine: Engine,
    model: Any,
    reference_logprobs: Any,
    until: Callable[[Callable[[], bool]], Awaitable[None]],
) -> None:
    (first, merged_first), (second, merged_second) = (make_adapter(model, seed) for seed in (1, 2))
    await engine.update_weights(Version(1, 0), first)
    running = asyncio.create_task(engine.generate(ask("long", 2000)))
    await until(lambda: engine.num_running == 1)
    await engine.update_weights(Version(1, 1), second)
    completion = await running
    assert [span[:2] for span in completion.spans] == [(1, 0), (1, 1)]
    for span, merged in zip(completion.spans, (merged_first, merged_second), strict=True):
        here = slice(span.start, span.end)
        expected = reference_logprobs(merged, PROMPT, completion)
        assert np.abs(completion.logprobs - expected)[here].max() < 1e-4


async def test_in_bfloat16_the_merge_is_rounded_once(
    start_engine: Callable[[RunSpec], Engine], lora_spec: Any, make_model: Callable[..., Any], tmp_path: Path
) -> None:
    model = make_model()
    engine = start_engine(lora_spec(tmp_path, model, generation_precision="bfloat16"))
    adapter, _ = make_adapter(model, 1)
    await engine.update_weights(Version(1, 0), adapter)
    layer: Any = engine._model.module.get_submodule("model.layers.1.mlp.up_proj")  # type: ignore[attr-defined]
    base = model.state_dict()["model.layers.1.mlp.up_proj.weight"].bfloat16().float()
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_{}.weight"
    a, b = adapter[name.format("A")], adapter[name.format("B")]
    assert torch.equal(layer.weight, (base + ALPHA / DIM * (b @ a)).bfloat16())


@pytest.mark.parametrize("tied", [True, False])
def test_an_engine_that_takes_whole_weights_gets_the_merged_models(
    lora_spec: Any, make_model: Callable[..., Any], tmp_path: Path, tied: bool
) -> None:
    model = make_model(tied=tied)
    policy = lora_spec(tmp_path, model).policy
    weights = MergedAdapter(policy, meta_layout(read_config(policy)), "cpu")
    for seed in (1, 2):
        adapter, merged = make_adapter(model, seed)
        weights.check(adapter)
        whole, expected = weights.whole(adapter), merged.state_dict()
        assert set(whole) == set(expected)
        for name, tensor in expected.items():
            torch.testing.assert_close(whole[name], tensor, rtol=0, atol=1e-6)
    with pytest.raises(InvalidInput, match=r"policy\.lora_cfg"):
        weights.check(model.state_dict())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a: a.pop(FINGERPRINT), "these weights are not an adapter"),
        (lambda a: a.update({FINGERPRINT: a[FINGERPRINT] ^ 1}), "another base"),
        (lambda a: a.update({"lm_head.weight": torch.zeros(2, 2)}), "'lm_head.weight' is not one of a pair"),
        (lambda a: a.pop(next(n for n in a if "lora_B" in n)), "is not one of a pair"),
        (lambda a: _rename(a, "q_proj", "x_proj"), "not a linear layer of this model"),
        (lambda a: _change(a, "lora_A", lambda t: t[:2]), r"shapes \(2, 32\)"),
        (lambda a: _change(a, "lora_B", lambda t: t * float("nan")), "NaN or infinite"),
    ],
)
async def test_what_does_not_fit_is_refused_and_the_old_adapter_serves(
    engine: Engine, model: Any, damage: Callable[[Any], Any], message: str
) -> None:
    adapter, _ = make_adapter(model, 1)
    await engine.update_weights(Version(1, 0), adapter)
    before = await engine.generate(ask("a"))
    broken, _ = make_adapter(model, 2)
    damage(broken)
    with pytest.raises(InvalidInput, match=message):
        await engine.update_weights(Version(1, 1), broken)
    assert engine.version == Version(1, 0)
    after = await engine.generate(ask("b"))
    assert np.allclose(after.logprobs, before.logprobs, rtol=0, atol=1e-6)


async def test_a_whole_models_weights_are_refused(engine: Engine, model: Any) -> None:
    with pytest.raises(InvalidInput, match=r"policy\.lora_cfg"):
        await engine.update_weights(Version(1, 0), model.state_dict())


def _rename(adapter: dict[str, torch.Tensor], old: str, new: str) -> None:
    for name in [name for name in adapter if old in name]:
        adapter[name.replace(old, new)] = adapter.pop(name)


def _change(adapter: dict[str, torch.Tensor], part: str, change: Callable[[Any], Any]) -> None:
    name = next(name for name in adapter if part in name)
    adapter[name] = change(adapter[name])

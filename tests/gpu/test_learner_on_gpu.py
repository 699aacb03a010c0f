"""The learner's steps on a GPU against the same steps on a CPU in float32 (`make campaign NAME=gpu`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loaded_models import differing, save_model
from mesh_cases import CASES, batch_of, save_models
from tiny_policy import CPU, make_batch, make_spec, run_case

from paceline.learner.batch.samples import SequenceLayout, SharedPrompt
from paceline.learner.checkpoints import checkpoint
from paceline.learner.model.attention import packed_attention
from paceline.learner.model.logprobs import chunked_logprobs
from paceline.learner.model.policy import load_policy
from paceline.learner.step.trainer import Trainer
from paceline.learner.weights.gather import gather_weights

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

ROW_TOKENS = 24
SETTINGS: dict[str, dict[str, Any]] = {
    "one row": {"train_mb_tokens": 4096},
    "full checkpointing": {"activation_checkpointing": "full"},
    "selective checkpointing": {"activation_checkpointing": "selective"},
    "compiled layers": {"compile": True},
    "float32 head": {"float32_head": True},
    "offloaded": {"cpu_offload": True},
    "bfloat16 moments": {"optimizer": {"lr": 1e-3, "weight_decay": 0.1, "state_dtype": "bfloat16"}},
    "offloaded moments": {"optimizer": {"lr": 1e-3, "weight_decay": 0.1, "offload": True}},
    "float16": {"precision": "float16"},
    "deterministic": {"deterministic": True},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    save_model("scaled", folder / "window")  # Gemma 3: windows of 8 tokens
    return folder


def gradients(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items() if name.startswith("grad.")}


@pytest.mark.parametrize("name", CASES)
def test_an_objective_in_float32_computes_what_a_cpu_does(name: str, models: Path, device: torch.device) -> None:
    model, case = CASES[name]
    expected, on_cpu = run_case(models / model, case, batch_of(name), ROW_TOKENS)
    metrics, on_gpu = run_case(models / model, case | {"precision": "float32"}, batch_of(name), ROW_TOKENS, device)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-3, abs=1e-4)
    for key, tensor in gradients(on_cpu).items():
        assert torch.allclose(on_gpu[key].cpu(), tensor, rtol=1e-3, atol=1e-4), key


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("model", ["dense", "window"])
def test_a_setting_in_16_bits_stays_near(name: str, model: str, models: Path, device: torch.device) -> None:
    optimizer = {"optimizer": {"lr": 1e-3, "weight_decay": 0.1}}
    expected, _ = run_case(models / model, optimizer, make_batch(), ROW_TOKENS)
    settings = {"train_mb_tokens": ROW_TOKENS, "precision": "bfloat16", **optimizer, **SETTINGS[name]}
    metrics, _ = run_case(models / model, settings, make_batch(), None, device)
    assert metrics["logprob"] == pytest.approx(expected["logprob"], rel=0.05)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.2)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("key_value_heads", [4, 2])
@pytest.mark.parametrize("shared", [(), (SharedPrompt(0, 17, (9, 0, 9)),)], ids=["apart", "shared"])
def test_flash_attention_is_that_of_the_runs(
    shared: tuple[SharedPrompt, ...], window: int | None, key_value_heads: int, device: torch.device
) -> None:
    layout = SequenceLayout.of([17, 9, 9, 3], device, shared)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, 38, 64, generator=generator).bfloat16().to(device)
        for heads in (4, key_value_heads, key_value_heads)
    )
    module = torch.nn.Identity()
    out, _ = packed_attention(module, q, k, v, None, layout=layout, sliding_window=window)
    exact, _ = packed_attention(module, q.float(), k.float(), v.float(), None, layout=layout, sliding_window=window)
    assert (out.float() - exact).abs().max() < 0.02


@pytest.mark.parametrize("float32_head", [False, True])
def test_the_head_computes_what_a_cpu_does(float32_head: bool, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator) for n in (50, 40_000))
    targets = torch.randint(0, 40_000, (50,), generator=generator)

    def run(where: torch.device) -> list[torch.Tensor]:
        inputs = [hidden.to(where, copy=True).requires_grad_(), (weight * 0.05).to(where).requires_grad_()]
        logprobs, entropy = chunked_logprobs(
            *inputs, targets.to(where), temperature=0.7, chunk_tokens=16, float32_head=float32_head
        )
        logprobs.sum().backward()  # type: ignore[no-untyped-call]
        found: list[Any] = [logprobs.detach(), entropy.detach(), *(each.grad for each in inputs)]
        return [each.cpu() for each in found]

    for on_gpu, on_cpu in zip(run(device), run(CPU), strict=True):
        assert torch.allclose(on_gpu, on_cpu, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_goes_on_where_it_was_written(models: Path, tmp_path: Path, device: torch.device) -> None:
    def trainer() -> Trainer:
        torch.manual_seed(0)
        return Trainer(make_spec(models / "dense", precision="bfloat16", deterministic=True), device)

    first = trainer()
    first.train_step(make_batch(), 0)
    saved = checkpoint.save(tmp_path, session=1, step=1, model=first.model, optimizer=first.optimizer)
    assert saved is not None
    expected = first.train_step(make_batch(), 1)
    second = trainer()
    checkpoint.load(saved.path, expected_sha256=saved.manifest_sha256, model=second.model, optimizer=second.optimizer)
    metrics = second.train_step(make_batch(), 1)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_model_is_loaded_and_gathered_bit_for_bit(kind: str, models: Path, device: torch.device) -> None:
    policy = make_spec(models / kind, precision="bfloat16").policy
    model = load_policy(policy, device)
    assert differing(model, models / kind, torch.float32) == []
    gathered = gather_weights(model, torch.bfloat16)
    for name, tensor in load_policy(make_spec(models / kind).policy, CPU).state_dict().items():
        assert torch.equal(gathered[name], tensor.bfloat16()), name

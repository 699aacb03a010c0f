"""The reference in the reward pool against plain transformers: values, passes, chunks, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_zoo import WORKING
from tiny_models import tiny_qwen3
from transformers import Qwen3ForCausalLM

from paceline.errors import InvalidInput
from paceline.groups import IntArray
from paceline.reward.reference import ReferenceModel, ReferenceScorer
from paceline.services.demo.task import make_model
from paceline.spec import RunSpec

VOCABULARY = 29
PROMPT = np.array([3, 1, 4], np.int32)
COMPLETIONS = [np.array(ids, np.int32) for ids in ([5, 9, 2, 6, 8], [], [7], [1, 1, 2], [28, 0, 28, 0])]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    tiny_qwen3(vocab_size=VOCABULARY, initializer_range=0.3).save_pretrained(folder)
    return folder


def spec_of(model: Path, algorithm: str = "distillation", **policy: Any) -> RunSpec:
    loss_fn = {"reference_policy_pool": "reward", "reference_policy_kl_penalty": 0.1}
    return RunSpec.model_validate(
        {
            "algorithm": algorithm,
            "policy": {
                "model_name": str(model),
                "generation": {"max_new_tokens": 8, "temperature": 0.7},
                **policy,
            },
            "data": {"train": "unused.jsonl"},
            "rewards": [{"function": "length"}],
            "distillation": {"teacher_model_name": str(model), "teacher_pool": "reward"},
            "loss_fn": {} if algorithm == "distillation" else loss_fn,
        }
    )


def demo_models(folder: Path) -> tuple[Path, Path]:
    """A student and a teacher with the demo's tokenizer."""
    for name, seed in (("student", 0), ("teacher", 1)):
        make_model(folder / name, seed=seed, hidden=16, layers=1, heads=2)
    return folder / "student", folder / "teacher"


def plain(folder: Path, ids: IntArray) -> list[float]:
    """By one unpadded forward of the model as transformers has it."""
    lm = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    row_T = torch.from_numpy(np.concatenate((PROMPT, ids)).astype(np.int64))
    with torch.no_grad():
        logp_TV = (lm(row_T[None]).logits[0] / 0.7).log_softmax(-1)
    places = range(len(PROMPT) - 1, len(row_T) - 1)
    return [float(logp_TV[place, row_T[place + 1]]) for place in places]


@pytest.mark.parametrize("row_tokens", [1, 12, 8192])
@pytest.mark.parametrize("chunk_tokens", [2, 1024])
def test_each_token_has_the_models_own_log_probability(row_tokens: int, chunk_tokens: int, model: Path) -> None:
    policy = spec_of(model, train_mb_tokens=row_tokens, logprob_chunk_tokens=chunk_tokens).frozen_policy
    assert policy is not None
    found = ReferenceModel(policy, 0.7).logprobs(PROMPT, COMPLETIONS)
    assert [values.dtype for values in found] == [np.float32] * len(COMPLETIONS)
    for ids, values in zip(COMPLETIONS, found, strict=True):
        assert values.tolist() == pytest.approx(plain(model, ids), abs=2e-5)


async def test_a_run_asks_what_its_spec_names(tmp_path: Path) -> None:
    student, teacher = demo_models(tmp_path)
    spec = spec_of(student)
    named = spec.distillation.model_copy(update={"teacher_model_name": str(teacher)})
    ids = [np.array([4, 2], np.int32)]
    async with (
        ReferenceScorer(spec.model_copy(update={"distillation": named})) as distilled,
        ReferenceScorer(spec_of(student, "grpo")) as penalised,
    ):
        by_teacher, by_student = await distilled.score(PROMPT, ids), await penalised.score(PROMPT, ids)
    for folder, found in ((teacher, by_teacher), (student, by_student)):
        expected = ReferenceModel(spec_of(folder).policy, 0.7).logprobs(PROMPT, ids)
        assert found[0].tolist() == expected[0].tolist()
    assert by_teacher[0].tolist() != by_student[0].tolist()


async def test_without_a_reference_in_the_pool_nothing_is_loaded() -> None:
    spec = spec_of(Path("nowhere")).model_copy(update={"algorithm": "grpo"})
    async with ReferenceScorer(spec) as scorer:
        with pytest.raises(InvalidInput, match="has none in the reward pool"):
            await scorer.score(PROMPT, COMPLETIONS)


async def test_a_teacher_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    student, teacher = demo_models(tmp_path)
    text = (teacher / "tokenizer.json").read_text()
    (teacher / "tokenizer.json").write_text(text.replace('"+"', '"plus"'))
    spec = spec_of(student)
    named = spec.distillation.model_copy(update={"teacher_model_name": str(teacher)})
    with pytest.raises(InvalidInput, match=r"another tokenizer than the student .*'\+'"):
        async with ReferenceScorer(spec.model_copy(update={"distillation": named})):
            pass


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    policy = spec_of(tmp_path / "none").policy
    with pytest.raises(InvalidInput, match="no such folder"):
        ReferenceModel(policy, 1.0)


@pytest.mark.parametrize("name", ["FalconH1", "Gemma2", "Granite", "Llama4", "MiniCPM3", "Phi", "RecurrentGemma"])
def test_logits_are_scaled_and_capped_as_the_model_does(name: str, tmp_path: Path) -> None:
    (architecture,) = (each for each in WORKING if each.class_name == name)
    lm = architecture.make()
    lm.save_pretrained(tmp_path)
    completions = [ids % 23 for ids in COMPLETIONS]
    found = ReferenceModel(spec_of(tmp_path).policy, 0.7).logprobs(PROMPT, completions)
    for ids, values in zip(completions, found, strict=True):
        row_T = torch.from_numpy(np.concatenate((PROMPT, ids)).astype(np.int64))
        with torch.no_grad():
            logp_TV = (lm(row_T[None]).logits[0].float() / 0.7).log_softmax(-1)
        expected = logp_TV[len(PROMPT) - 1 : -1].gather(-1, row_T[len(PROMPT) :, None])[:, 0]
        np.testing.assert_allclose(values, expected.numpy(), atol=2e-5)


def test_logits_by_an_unknown_rule_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_forward = Qwen3ForCausalLM.forward

    def squared(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain_forward(self, *args, **kwargs)
        output.logits = output.logits.square()
        return output

    monkeypatch.setattr(Qwen3ForCausalLM, "forward", squared)
    with pytest.raises(InvalidInput, match=r"the reference .* do not follow from its LM head by a known rule"):
        ReferenceModel(spec_of(model).policy, 1.0)


def test_what_is_not_finite_is_no_answer(model: Path, tmp_path: Path) -> None:
    lm = Qwen3ForCausalLM.from_pretrained(model)
    with torch.no_grad():
        lm.model.norm.weight[:] = 3e38  # the weights are finite, the logits are not
    lm.save_pretrained(tmp_path / "broken")
    with pytest.raises(InvalidInput, match="not finite"):
        ReferenceModel(spec_of(tmp_path / "broken").policy, 1.0).logprobs(PROMPT, COMPLETIONS)

"""Log-probabilities of continuations are transformers' own, and so are the choices by them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from evaluation_questions import QUESTIONS
from transformers_scores import scores_by_transformers

from services.cli.chat import spec_of_model
from services.cli.evaluating.evaluation_spec import evaluation_spec
from services.evaluation.engine_model import EngineModel
from services.evaluation.runner import evaluate
from services.model_server.serving import opened_model


async def test_choices_are_those_of_transformers(folder: Path) -> None:
    spec = evaluation_spec(folder / "choose.yaml", (), spec_of_model(str(folder / "model"), folder))
    async with opened_model(spec, "model") as served:
        result, samples, questions = await evaluate(EngineModel(served), spec, 0)
    assert questions[0] == "Two and two?"
    right = []
    for sample, (_, texts, gold) in zip(samples, QUESTIONS, strict=True):
        expected = scores_by_transformers(folder / "model", sample["prompt"], [f" {text}" for text in texts])
        logprobs = [score.logprob for score in expected]
        assert [score["logprob"] for score in sample["choices"]] == pytest.approx(logprobs, abs=1e-4)
        assert [score["is_greedy"] for score in sample["choices"]] == [each.is_greedy for each in expected]
        raw = max(range(len(texts)), key=logprobs.__getitem__)
        norm = max(
            range(len(texts)), key=[p / len(t) for p, t in zip(logprobs, texts, strict=True)].__getitem__
        )
        assert sample["completion"] == "ABC"[raw]
        assert sample["rewards"] == {"acc": float(raw == gold), "acc_norm": float(norm == gold)}
        right.append((raw == gold, norm == gold))
    for name, place in (("reward/acc", 0), ("reward/acc_norm", 1)):
        assert result["metrics"][name]["value"] == pytest.approx(
            sum(each[place] for each in right) / len(right)
        )
    assert result["metrics"]["reward"] == result["metrics"]["reward/acc"]


async def test_a_chat_is_scored_behind_its_template(folder: Path) -> None:
    (folder / "choose.yaml").write_text(
        (folder / "choose.yaml").read_text().replace("template: never", "template: always")
    )
    spec = evaluation_spec(folder / "choose.yaml", (), spec_of_model(str(folder / "model"), folder))
    async with opened_model(spec, "model") as served:
        (score,) = await EngineModel(served).score("One?", ["2"])
        ids = served.tokenizer("<|user|>One?<|end|><|assistant|>2")["input_ids"]
        expected = await served.engine.prompt_logprobs(torch.tensor(ids).numpy())
    assert score.logprob == pytest.approx(float(expected.logprobs[-1]), abs=1e-5)

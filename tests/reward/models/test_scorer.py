"""Scores equal those of transformers on each text alone; what cannot be scored is refused or None."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reward_models import MAX_TOKENS, save_classifier
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from paceline.errors import InvalidInput, Unreadable
from paceline.reward.models.scorer import load_scorer, steps_of
from paceline.reward.models.settings import ModelSettings, ProcessModelSettings

PROMPTS = ["1+1=", "12+34=", "7+8=", "1+1=", "99+99="]
COMPLETIONS = ["2", "640", "", "2" * 40, "891"]


def scores(settings: ModelSettings, prompts: list[str], completions: list[str]) -> list[Any]:
    scorer = load_scorer(settings)
    return scorer.scores([scorer.encode(*pair) for pair in zip(prompts, completions, strict=True)])


@pytest.mark.parametrize("max_batch_tokens", [1, 60, 10_000])
def test_scores_are_those_of_transformers_on_the_text_alone(tmp_path: Path, max_batch_tokens: int) -> None:
    save_classifier(tmp_path)
    got = scores(ModelSettings(path=str(tmp_path), max_batch_tokens=max_batch_tokens), PROMPTS, COMPLETIONS)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    expected = []
    with torch.inference_mode():
        for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
            ids = [*tokenizer(prompt + completion)["input_ids"], tokenizer.eos_token_id]
            expected.append(model(input_ids=torch.tensor([ids])).logits[0, 0].item())
    assert [value for (value,) in got] == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.1


def test_steps_are_scored_at_their_separators(tmp_path: Path) -> None:
    save_classifier(tmp_path, labels=2, by_token=True)
    settings = ProcessModelSettings(path=str(tmp_path), step_separator="=")
    got = scores(settings, ["1+1=", "1+1="], ["2=3=", "12"])
    model = AutoModelForTokenClassification.from_pretrained(tmp_path).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with torch.inference_mode():
        whole = model(input_ids=torch.tensor([tokenizer("1+1=2=3=")["input_ids"]])).logits[0].softmax(-1)
        short = model(input_ids=torch.tensor([tokenizer("1+1=12=")["input_ids"]])).logits[0].softmax(-1)
    assert got[0] == pytest.approx([whole[5, 1].item(), whole[7, 1].item()], abs=1e-6)
    assert got[1] == pytest.approx([short[6, 1].item()], abs=1e-6)


def test_one_output_for_a_step_is_a_sigmoid(tmp_path: Path) -> None:
    save_classifier(tmp_path, labels=1, by_token=True)
    ((value,),) = scores(ProcessModelSettings(path=str(tmp_path), step_separator="="), ["1"], ["2"])
    model = AutoModelForTokenClassification.from_pretrained(tmp_path).eval()
    ids = AutoTokenizer.from_pretrained(tmp_path)("12=")["input_ids"]
    with torch.inference_mode():
        assert value == pytest.approx(model(input_ids=torch.tensor([ids])).logits[0, -1, 0].sigmoid().item(), abs=1e-6)


def test_steps() -> None:
    assert steps_of("a\n\nb\n\n \n\nc", "\n\n") == ["a", "b", "c"]
    assert steps_of("", "\n\n") == [""]


def test_a_text_beyond_the_models_length_has_no_score(tmp_path: Path) -> None:
    save_classifier(tmp_path)
    got = scores(ModelSettings(path=str(tmp_path)), ["1", "1"], ["2" * (MAX_TOKENS - 2), "2" * (MAX_TOKENS - 1)])
    assert got[0] is not None
    assert got[1] is None


def test_a_score_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    save_classifier(tmp_path)
    scorer = load_scorer(ModelSettings(path=str(tmp_path)))
    scorer._model.score.weight.data.fill_(float("nan"))
    with pytest.raises(InvalidInput, match="not finite"):
        scorer.scores([scorer.encode("1", "2")])


def test_models_of_another_kind_are_refused(tmp_path: Path) -> None:
    steps, many = (
        save_classifier(tmp_path / "a", labels=2, by_token=True),
        save_classifier(tmp_path / "b", labels=3),
    )
    with pytest.raises(InvalidInput, match="Qwen3ForTokenClassification with 2 outputs; reward_model needs"):
        load_scorer(ModelSettings(path=str(steps)))
    with pytest.raises(InvalidInput, match="with 3 outputs; reward_model needs"):
        load_scorer(ModelSettings(path=str(many)))
    with pytest.raises(InvalidInput, match="process_reward_model needs a model for token classification"):
        load_scorer(ProcessModelSettings(path=str(many)))
    with pytest.raises(InvalidInput, match="positive_label is 2; set it to 0 … 1"):
        load_scorer(ProcessModelSettings(path=str(steps), positive_label=2))


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match=r"no config\.json"):
        load_scorer(ModelSettings(path=str(tmp_path)))
    save_classifier(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises((InvalidInput, Unreadable), match="reward model"):
        load_scorer(ModelSettings(path=str(tmp_path)))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config)[:-20])
    with pytest.raises((InvalidInput, Unreadable), match="reward model"):
        load_scorer(ModelSettings(path=str(tmp_path)))


def test_a_gpu_that_is_not_there_is_named(tmp_path: Path) -> None:
    save_classifier(tmp_path)
    with pytest.raises(Unreadable, match=r"device is 'cuda:97', but the worker sees \d+ GPUs"):
        load_scorer(ModelSettings(path=str(tmp_path), device="cuda:97"))

"""Recorded solutions scored as an evaluation scores completions, groups of problems, and two completions compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.apps.evaluation.evaluate import evaluation_spec, spec_of_endpoint
from paceline.apps.evaluation.problems import ContinuationScore
from paceline.apps.evaluation.runner import Evaluated, evaluate
from paceline.apps.evaluation.tasks import task_file
from paceline.errors import InvalidInput
from paceline.groups import Completion

RECORDED = Path(__file__).resolve().parents[4] / "shared" / "data" / "gsm8k"
NOTHING = np.empty(0)


class Recording:
    """A model whose completions of each prompt are given."""

    name, concurrency = "recorded", 64

    def __init__(self, texts: Mapping[str, Sequence[str]]) -> None:
        self._texts = texts

    async def sample(self, prompt: Any, index: int, seed: int, tools: list[Any] | None = None) -> list[Completion]:
        question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        return [
            Completion(NOTHING.astype(np.int32), NOTHING.astype(np.float32), (), "stop", text)
            for text in self._texts[question]
        ]

    async def score(self, prompt: Any, continuations: Sequence[str]) -> list[ContinuationScore]:
        raise AssertionError("no test asks it for log-probabilities")


async def test_gsm8ks_recorded_solutions_get_their_published_verdicts() -> None:
    if not RECORDED.is_dir():
        pytest.skip("the recorded solutions are not on this machine")
    lines = (RECORDED / "example_model_solutions.jsonl").read_text().splitlines()
    verdicts, texts = {}, {}
    for row in map(json.loads, lines):
        solutions = [value for value in row.values() if isinstance(value, dict)]
        texts[row["question"]] = [each["solution"] for each in solutions]
        verdicts[row["question"]] = [float(each["is_correct"]) for each in solutions]
    file = task_file("gsm8k")
    assert file is not None
    overrides = (
        f"data.validation={RECORDED / 'test.jsonl'}",
        "data.validation_config=null",
        "grpo.val_samples_per_prompt=4",
    )
    spec = evaluation_spec(file, overrides, spec_of_endpoint("none"))
    result, samples, _ = await evaluate(Recording(texts), spec, 0)
    assert (result["problems"], result["failed"], len(samples)) == (1319, 0, 5276)
    correct = [0.0] * 4
    for sample in samples:
        expected = verdicts[sample["prompt"][-1]["content"]][sample["sample"]]
        assert sample["rewards"]["math_accuracy"] == expected
        correct[sample["sample"]] += expected
    sums = np.array([sum(each) for each in verdicts.values()])
    assert ((sums > 0) & (sums < 4)).sum() == 731
    assert [each / 1319 for each in correct] == [
        pytest.approx(sum(each[place] for each in verdicts.values()) / 1319) for place in range(4)
    ]
    metrics = result["metrics"]
    assert metrics["reward/math_accuracy"]["value"] == pytest.approx(sums.sum() / 5276)
    assert metrics["pass@4/math_accuracy"]["value"] == pytest.approx((sums > 0).mean())
    assert 0 < metrics["cons@4/math_accuracy"]["value"] < 1


async def evaluated(folder: Path, rows: list[dict[str, Any]], text: str) -> Evaluated:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "eval.yaml").write_text(text)
    spec = evaluation_spec(folder / "eval.yaml", (), spec_of_endpoint("none"))
    prefers = spec.evaluation.method == "prefer"
    model = None if prefers else Recording({row["prompt"]: row["says"] for row in rows})
    return await evaluate(model, spec, 0)


GROUPED = """
data: {validation: rows.jsonl}
evaluation: {group_by: [topic]}
rewards: [{function: exact_match, name: right}]
"""

SOURCES = """
data: {validation: [sums.jsonl, words.jsonl], source_key: task}
rewards: [{function: exact_match, name: right}]
"""


async def test_metrics_of_groups_and_the_gap_between_them(tmp_path: Path) -> None:
    says = ["a"] * 6 + ["b"] * 2
    rows = [
        {"prompt": f"{index}", "says": [word], "answer": "a", "topic": ["red", "blue"][index % 2]}
        for index, word in enumerate([*says, "b", "a"])
    ]
    result, samples, _ = await evaluated(tmp_path, rows, GROUPED)
    metrics = result["metrics"]
    assert metrics["reward/right[topic=red]"]["value"] == pytest.approx(3 / 5)
    assert metrics["reward/right[topic=blue]"]["value"] == pytest.approx(4 / 5)
    assert metrics["gap/reward/right[topic]"]["value"] == pytest.approx(1 / 5)
    assert metrics["gap/reward/right[topic]"]["low"] >= 0
    assert samples[1]["groups"] == {"topic": "blue"}
    with pytest.raises(InvalidInput, match=r"group_by names 'subject', but the columns are"):
        await evaluated(tmp_path, rows, GROUPED.replace("[topic]", "[subject]"))


async def test_sources_are_reported_as_groups_are_and_files_of_a_list_by_their_names(tmp_path: Path) -> None:
    for name, words in (("sums", "aaab"), ("words", "ab")):
        rows = [{"prompt": f"{name}{index}", "answer": "a"} for index in range(len(words))]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "eval.yaml").write_text(SOURCES)
    spec = evaluation_spec(tmp_path / "eval.yaml", (), spec_of_endpoint("none"))
    says = {f"sums{index}": [word] for index, word in enumerate("aaab")} | {"words0": ["a"], "words1": ["b"]}
    result, samples, _ = await evaluate(Recording(says), spec, 0)
    metrics = {name: found["value"] for name, found in result["metrics"].items()}
    assert metrics["reward/right"] == pytest.approx(4 / 6)
    assert metrics["reward/right[task=sums]"] == pytest.approx(3 / 4)
    assert metrics["reward/right[task=words]"] == pytest.approx(1 / 2)
    assert metrics["gap/reward/right[task]"] == pytest.approx(1 / 4)
    assert [sample["groups"]["task"] for sample in samples] == ["sums"] * 4 + ["words"] * 2


async def test_a_source_that_no_row_has_makes_no_groups(tmp_path: Path) -> None:
    text = GROUPED.replace("rows.jsonl", "rows.jsonl, source_key: origin").replace("[topic]", "[]")
    result, samples, _ = await evaluated(tmp_path, [{"prompt": "1", "says": ["a"], "answer": "a"}], text)
    assert result["metrics"].keys() == {"reward", "reward/right"}
    assert "groups" not in samples[0]


async def test_preferred_is_the_completion_with_the_higher_reward(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "def size(prompts, completions, **columns):\n    return [float(len(text)) for text in completions]\n"
    )
    rows = [
        {"prompt": "1", "chosen": "long", "rejected": "no", "subset": "a"},
        {"prompt": "2", "chosen": "no", "rejected": "long", "subset": "a"},
        {"prompt": "3", "chosen": "same", "rejected": "size", "subset": "b"},
        {"prompt": "4", "chosen": "", "rejected": "size", "subset": "b"},
    ]
    text = """
data: {validation: rows.jsonl}
evaluation: {method: prefer, group_by: [subset]}
rewards: [{function: "rewards.py:size", weight: 0.5}]
"""
    result, samples, _ = await evaluated(tmp_path, rows, text)
    assert [sample["reward"] for sample in samples] == [1.0, 0.0, 0.5]
    assert result["metrics"]["reward/size"]["value"] == pytest.approx(0.5)
    assert result["failed"] == 1
    assert "column 'chosen' is ''" in result["failures"][0]


async def test_the_number_of_a_row_says_which_completion_is_preferred(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "def size(prompts, completions, **columns):\n    return [float(len(text)) for text in completions]\n"
    )
    rows = [{"prompt": "1", "a": "longer", "b": "no", "better": better} for better in (-1, 2, 0)]
    text = """
data: {validation: rows.jsonl, chosen_key: a, rejected_key: b, preference_key: better}
evaluation: {method: prefer}
rewards: [{function: "rewards.py:size"}]
"""
    result, samples, _ = await evaluated(tmp_path, rows, text)
    assert [sample["reward"] for sample in samples] == [1.0, 0.0]
    assert result["failed"] == 1
    assert "column 'better' is 0 (no completion is better), so the row cannot be evaluated" in result["failures"][0]


async def test_choose_needs_the_columns_with_the_answers(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"data\.choices is not set"):
        await evaluated(tmp_path, [{"prompt": "1", "says": []}], GROUPED.replace("group_by: [topic]", "method: choose"))


SAMPLED = """
data: {validation: rows.jsonl}
grpo: {val_samples_per_prompt: 4}
rewards:
  - {function: exact_match, name: right}
  - {function: "mine.py:some", name: some}
"""
SOME = """
def some(completions, scores, **columns):
    return scores[0]
"""
GIVEN: dict[str, tuple[list[list[float | None]], dict[str, float | None], int]] = {
    # rewards of two problems, metrics of the function, completions without a number
    "all": ([[1, 0, 0, 0], [0, 0, 0, 0]], {"pass@1": 0.125, "pass@2": 0.25, "pass@4": 0.5}, 0),
    "one None": ([[1, 0, 0, None], [0, 0, 0, 0]], {"pass@1": 1 / 6, "pass@2": 1 / 3, "pass@4": 0.0}, 1),
    "one problem without any": ([[1, 1, 1, 1], [None] * 4], {"pass@1": 1.0, "pass@4": 1.0, "cons@4": 1.0}, 4),
    "no number at all": ([[None] * 4, [None] * 4], {"pass@1": None, "cons@4": None}, 8),
    "one number": ([[None, None, None, 1], [None] * 4], {"pass@1": 1.0, "pass@2": None, "cons@4": None}, 7),
    "neither 0 nor 1": ([[0.5, 0, 0, None], [0, 0, 0, 0]], {"pass@1": None}, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
async def test_a_completion_without_a_number_takes_no_metric_away(tmp_path: Path, name: str) -> None:
    scores, expected, unscored = GIVEN[name]
    (tmp_path / "mine.py").write_text(SOME)
    says = [f"\\boxed{{{letter}}}" for letter in "1234"]
    rows = [
        {"prompt": f"{index}", "says": says, "answer": says[0], "scores": each} for index, each in enumerate(scores)
    ]
    result, _, _ = await evaluated(tmp_path, rows, SAMPLED)
    metrics = result["metrics"]
    for metric, value in expected.items():
        assert metrics.get(f"{metric}/some", {"value": None})["value"] == (value and pytest.approx(value))
    assert result["unscored"] == ({"some": unscored} if unscored else {})
    assert metrics["pass@4/right"]["value"] == 1.0
    assert metrics["cons@4/right"]["value"] == 0.25


async def test_a_group_without_any_number_makes_no_gap_of_0(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1", "says": ["a"], "answer": "a", "topic": "red"},
        {"prompt": "2", "says": ["a"], "answer": None, "topic": "blue"},
    ]
    result, _, _ = await evaluated(tmp_path, rows, GROUPED)
    assert "reward/right[topic=red]" in result["metrics"]
    assert "gap/reward/right[topic]" not in result["metrics"]

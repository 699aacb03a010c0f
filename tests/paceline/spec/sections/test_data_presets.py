"""Data presets on generated rows with exactly the columns of the public data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from command_line import paceline
from pydantic import ValidationError

from paceline.data.example_rows import read_preference
from paceline.data.examples import check_example, open_examples, report_of
from paceline.data.prompts import open_prompts
from paceline.data.rows import open_source
from paceline.spec import DataSection, RunSpec
from paceline.spec.sections.data import DATA_PRESETS, DataPresetName

TURN = {"role": "user", "content": "Name a colour."}
ROWS: dict[str, dict[str, Any]] = {
    "openmathinstruct2": {
        "problem": "3 * 24?",
        "generated_solution": "It is 72.",
        "expected_answer": "72",
        "problem_source": "augmented_gsm8k",
    },
    "helpsteer3": {
        "domain": "general",
        "language": "english",
        "context": [TURN],
        "response1": "Red.",
        "response2": "No.",
        "overall_preference": -2,
        "individual_preference": [
            {"score": -2, "reasoning": "It answers.", "feedback1": "Right.", "feedback2": "Rude."}
        ],
    },
    "deepscaler": {"problem": "3 * 24?", "answer": "72", "solution": "It is 72."},
    "tldr": {"prompt": "POST: a long text\n\nTL;DR:", "completion": " short"},
    "ultrafeedback": {
        "chosen": [TURN, {"role": "assistant", "content": "Red."}],
        "rejected": [TURN, {"role": "assistant", "content": "No."}],
        "score_chosen": 8.0,
        "score_rejected": 3.0,
    },
}


def spec_of(name: str, folder: Path, algorithm: str, *changes: dict[str, Any]) -> RunSpec:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(ROWS[name] | change) + "\n" for change in changes or ({},)))
    return RunSpec.model_validate(
        {
            "algorithm": algorithm,
            "policy": {"model_name": "model"},
            "data": {"preset": name, "train": str(path)},
            "rewards": [{"function": "math_accuracy"}] if algorithm == "grpo" else [],
        }
    )


def test_every_preset_has_made_rows() -> None:
    assert set(get_args(DataPresetName)) == DATA_PRESETS.keys() == ROWS.keys()


@pytest.mark.parametrize("name", ["openmathinstruct2", "deepscaler", "tldr"])
def test_demonstrations_and_prompts(name: str, tmp_path: Path) -> None:
    spec = spec_of(name, tmp_path, "sft")
    rows = open_source(spec.data.source(), check_example(spec))
    assert len(rows) == len(open_examples(spec)) == 1
    prompt, columns = open_prompts(spec_of(name, tmp_path, "grpo").data, 0).draw(0)
    assert prompt == ROWS[name].get("problem", ROWS[name].get("prompt"))
    assert spec.data.completion_key in columns


@pytest.mark.parametrize("name", ["ultrafeedback", "helpsteer3"])
@pytest.mark.parametrize("algorithm", ["dpo", "rm", "kto"])
def test_preferences(name: str, algorithm: str, tmp_path: Path) -> None:
    assert len(open_examples(spec_of(name, tmp_path, algorithm))) == (2 if algorithm == "kto" else 1)


def test_the_sign_says_which_response_is_chosen(tmp_path: Path) -> None:
    changes = [{"overall_preference": number} for number in (-3, 0, 1, 0, 3)]
    spec = spec_of("helpsteer3", tmp_path, "dpo", *changes)
    rows = open_examples(spec)
    pairs = [read_preference(rows[index], spec.data) for index in range(len(rows))]
    assert [pair.chosen for pair in pairs] == ["Red.", "No.", "No."]
    assert [pair.rejected for pair in pairs] == [("No.",), ("Red.",), ("Red.",)]
    assert all(pair.prompt == [TURN] for pair in pairs)
    assert report_of(rows, spec).endswith("; left out: 2 (neither completion is better)")
    as_kto = open_examples(spec_of("helpsteer3", tmp_path, "kto", *changes))
    assert [as_kto[index]["completion"] for index in range(4)] == ["Red.", "No.", "No.", "Red."]


def test_prompts_of_preferences_are_sampled_from_with_all_columns(tmp_path: Path) -> None:
    prompts = open_prompts(spec_of("helpsteer3", tmp_path, "grpo", {"overall_preference": 0}).data, 0)
    prompt, columns = prompts.draw(0)
    assert prompt == [TURN]
    assert columns.keys() == ROWS["helpsteer3"].keys() - {"context"}


@pytest.mark.parametrize("name", get_args(DataPresetName))
def test_inspect_reads_every_preset(name: str, tmp_path: Path) -> None:
    algorithm = "dpo" if name in ("ultrafeedback", "helpsteer3") else "sft"
    spec_of(name, tmp_path, algorithm)
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        f"algorithm: {algorithm}\npolicy: {{model_name: none}}\ndata: {{preset: {name}, train: ./rows.jsonl}}\n"
    )
    facts = json.loads(paceline("data", "inspect", spec, "--json").stdout)
    assert facts["train"]["columns"] == list(ROWS[name])
    completion = facts["samples"][0]["parts"][1]
    assert completion[1], "the completion trains"
    assert completion[0] in ("It is 72.", " short", "Red.", "<assistant> Red.\n")


def test_values_of_the_spec_win() -> None:
    hub = DataSection.model_validate({"preset": "deepscaler"})
    assert hub.train == "agentica-org/DeepScaleR-Preview-Dataset"
    assert DataSection.model_validate({"preset": "deepscaler", "prompt_key": "question"}).prompt_key == "question"
    with pytest.raises(ValidationError, match="preset"):
        DataSection.model_validate({"preset": "deepscale", "train": "x"})

"""`paceline spec`: keys explained, another library's name answered, a spec checked."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import paceline


def test_a_key_is_explained_with_type_and_default() -> None:
    assert paceline("spec", "--explain", "grpo.seed").stdout == (
        "grpo.seed (integer ≥ 0, default 42)\n    Seeds the order of the data, the sampling and the initialisation.\n"
    )


def test_a_section_lists_its_keys() -> None:
    shown = paceline("spec", "--explain", "rewards").stdout.splitlines()
    assert shown[0] == "rewards (list of sections)"
    assert "rewards.N.weight (number, default 1.0)" in shown


def test_a_last_part_is_enough() -> None:
    shown = paceline("spec", "--explain", "max_new_tokens").stdout
    assert shown.startswith("policy.generation.max_new_tokens (integer > 0, default 256)\n")


def test_a_foreign_name_is_answered() -> None:
    result = paceline("spec", "--explain", "report_to")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: report_to: unknown key; there is none, because TensorBoard")


def test_the_sections_are_listed() -> None:
    shown = paceline("spec").stdout
    assert "\npolicy (section, required)\n" in shown
    assert "\nalgorithm (`grpo`" not in shown


def test_json_has_one_line_for_each_key() -> None:
    assert paceline("spec", "--explain", "name", "--json").stdout.startswith('{"key": "')


SPEC = "{policy: {model_name: ./model}, data: {train: d.jsonl}, rewards: [{function: exact_match}]}"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"model-q4.gguf": "GGUF"}, "has its weights as GGUF, which no worker loads"),
        ({"config.json": "{}", "pytorch_model.bin": ""}, "has its weights as pickled files, which no worker loads"),
        ({"adapter_config.json": "{}"}, "has a LoRA adapter without its model"),
        ({}, "is an empty folder"),
        ({"config.json": '{"quantization_config": {"quant_method": "fp8"}}'}, "is quantised (fp8)"),
        ({"config.json": '{"model_type": "rwkv"}'}, "models of type 'rwkv' are not supported"),
        ({"config.json": "[]"}, ""),
    ],
)
def test_a_model_that_cannot_train_is_said_by_spec(tmp_path: Path, files: dict[str, str], said: str) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "model").mkdir()
    for name, text in files.items():
        (tmp_path / "model" / name).write_text(text)
    result = paceline("spec", str(tmp_path / "spec.yaml"))
    assert said in result.stderr
    assert result.exit_code == (1 if said else 0)


def test_a_setting_that_a_built_in_needs_is_said_by_spec(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    result = paceline("spec", str(tmp_path / "spec.yaml"), "rewards.0.function=length")
    assert result.stderr == (
        "Error: rewards.0: reward function 'length' needs 'tolerance_tokens'; write it into the function's kwargs\n"
    )


def test_code_that_a_file_lacks_is_said_by_spec(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "code.py").write_text("def near(prompts, completions): ...\nclass Sums: ...\n")
    for setting, said in (
        ("rewards.0.function=code.py:neer", "rewards.0: {} has no function 'neer'; did you mean 'near'?"),
        ("environment.class=code.py:Sum", "environment.class: {} has no class 'Sum'; did you mean 'Sums'?"),
        ("environment.agent=code.py:neer", "environment.agent: {} has no function 'neer'; did you mean 'near'?"),
    ):
        result = paceline("spec", str(tmp_path / "spec.yaml"), setting)
        assert result.stderr == f"Error: {said.format(tmp_path / 'code.py')}\n"
    assert paceline("spec", str(tmp_path / "spec.yaml"), "rewards.0.function=elsewhere.py:neer").exit_code == 0

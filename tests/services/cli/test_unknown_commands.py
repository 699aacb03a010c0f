"""Unknown commands: each is answered with the command that is meant, or with the reason why there is none."""

from __future__ import annotations

import pytest
from command_line import paceline

from paceline.services.cli.lazy import MEANT, remedy, setting_for
from paceline.services.cli.main import main


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("sample", "did you mean `paceline samples`?"),
        ("train", "did you mean `paceline up`?"),
        ("verify", "did you mean `paceline ledger verify`?"),
        ("logs", "did you mean `paceline watch`?"),
        ("evaluate", "did you mean `paceline eval`?"),
        ("run_eval.py", "did you mean `paceline eval`?"),
        ("upload", "did you mean `paceline models push`?"),
        ("examples/run_grpo_math.py", "did you mean `paceline grpo`?"),
        ("examples/converters/convert_dcp_to_hf.py", "did you mean `paceline export`?"),
        ("vllm-serve", "did you mean `paceline serve rollout`?"),
        ("sbumit", "did you mean `paceline submit`?"),
        ("GRPO", "did you mean `paceline grpo`?"),
        ("frobnicate", "`paceline --help` lists the commands"),
        ("x" * 5000, "`paceline --help` lists the commands"),
    ],
)
def test_an_unknown_command_says_what_was_meant(word: str, answer: str) -> None:
    assert remedy(word, main.entries).startswith(answer)


def test_every_command_that_is_named_exists() -> None:
    assert {meant.partition(" ")[0] for meant in MEANT.values()} <= main.entries.keys()


def test_the_command_line_answers_in_one_line() -> None:
    result = paceline("sample", "grpo-1")
    assert result.exit_code == 2
    assert result.stderr.endswith("Error: No such command 'sample'; did you mean `paceline samples`?\n")
    result = paceline("data", "gsm8k/grpo.yaml")
    assert result.exit_code == 2
    assert result.stderr.endswith("did you mean `paceline data inspect gsm8k/grpo.yaml`?\n")


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        (
            "--learning_rate",
            "; a setting is written as SECTION.KEY=VALUE, and TRL's 'learning_rate' is policy.optimizer.lr",
        ),
        (
            "--report-to",
            "; a setting is written as SECTION.KEY=VALUE, and there is none, because TensorBoard",
        ),
        ("--max_new_tokens", "did you mean 'policy.generation.max_new_tokens'?"),
        ("--algorithm", "; a setting is written as algorithm=VALUE"),
    ],
)
def test_an_option_that_is_a_setting_says_how_it_is_written(option: str, answer: str) -> None:
    assert answer in setting_for(option)


@pytest.mark.parametrize("command", ["dpo", "sft", "grpo"])
def test_every_algorithm_runs_without_the_page(command: str) -> None:
    assert "--no-page" in paceline(command, "--help").stdout


def test_json_of_several_objects_is_announced_as_lines() -> None:
    assert "one object a line" in paceline("metrics", "--help").stdout


def test_an_option_that_means_nothing_gets_no_answer() -> None:
    assert setting_for("--frobnicate") == setting_for("-x") == setting_for("--") == ""


def test_the_command_line_answers_an_option() -> None:
    result = paceline("grpo", "spec.yaml", "--learning_rate", "1e-6")
    assert result.exit_code == 2
    assert "--learning_rate'; a setting is written as SECTION.KEY=VALUE" in result.stderr

"""`paceline eval` and `paceline gate` on a tiny model: files, numbers, exit statuses."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner
from judge_server import JudgeServer
from safetensors.torch import load_file, save_file
from tiny_chat import save_tiny_chat

from paceline.models.evaluation_results import read_result
from paceline.services.cli.main import main

EVALUATION = """
name: short
policy: {generation: {max_new_tokens: 6, stop_strings: [zz]}}
data: {validation: problems.jsonl}
grpo: {val_samples_per_prompt: 4, max_val_samples: 30}
rewards:
  - {function: "rewards.py:is_even", name: even}
"""
REWARDS = """
def is_even(prompts, completions, **columns):
    return [float(len(text) % 2 == 0) for text in completions]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny_chat(tmp_path / "model")
    (tmp_path / "eval.yaml").write_text(EVALUATION)
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [json.dumps({"prompt": f"{i}+{i}="}) for i in range(40)]
    (tmp_path / "problems.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path


def by_text(text: str) -> Any:
    """A server's answer to `/v1/completions`."""

    async def answer(request: Any, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"choices": [{"text": text, "finish_reason": "stop"}]})

    return answer


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


def evaluated(folder: Path, name: str, *more: str) -> Any:
    return run("eval", folder / "eval.yaml", *more, "--model", folder / "model", "--output", folder / name)


@pytest.mark.parametrize(
    ("renamed", "words"),
    [
        (lambda name: None if "layers.0" in name else name, "lacks tensor 'model.layers.0."),
        (lambda name: f"_orig_mod.{name}", "names begin with '_orig_mod.'"),
    ],
)
def test_a_model_without_its_weights_has_no_result(
    folder: Path, renamed: Callable[[str], str | None], words: str
) -> None:
    file = folder / "model" / "model.safetensors"
    tensors = {new: tensor for name, tensor in load_file(file).items() if (new := renamed(name))}
    save_file(tensors, file, metadata={"format": "pt"})
    done = evaluated(folder, "random")
    assert done.exit_code == 1
    assert words in done.output
    assert not (folder / "random").exists()
    asked = run("generate", "--export", folder / "model", "1+1=")
    assert asked.exit_code == 1
    assert words in asked.output


def test_an_evaluation_writes_what_its_samples_say(folder: Path) -> None:
    done = evaluated(folder, "first")
    assert done.exit_code == 0, done.output
    assert "30 problems, 0 failed, 4 completions each" in done.output
    result, samples = read_result(folder / "first")
    assert len(samples) == 120
    assert all(sample["rewards"]["even"] == float(len(sample["completion"]) % 2 == 0) for sample in samples)
    by_problem = [[s["reward"] for s in samples[start : start + 4]] for start in range(0, 120, 4)]
    assert len({sample["problem"] for sample in samples}) == 30
    metrics = result["metrics"]
    assert metrics["reward/even"]["value"] == pytest.approx(sum(map(sum, by_problem)) / 120)
    assert metrics["pass@4/even"]["value"] == pytest.approx(sum(any(each) for each in by_problem) / 30)
    assert metrics["pass@1/even"]["value"] == pytest.approx(metrics["reward/even"]["value"])
    assert "pass@2/even" in metrics
    assert "cons@4/even" not in metrics  # no completion states an answer, and a 0 would say that all are wrong
    assert result["digests"].keys() == {"model", "samples", "spec"}
    assert evaluated(folder, "again").exit_code == 0
    assert read_result(folder / "again")[0] == result


def test_the_gate_has_an_exit_status_for_each_outcome(folder: Path) -> None:
    assert evaluated(folder, "first").exit_code == 0
    assert evaluated(folder, "few", "grpo.max_val_samples=5").exit_code == 0
    first, verdict = folder / "first", folder / "verdict.json"
    same = run("gate", first, "--baseline", first, "--output", verdict)
    assert same.exit_code == 0, same.output
    found = json.loads(verdict.read_text())
    assert found["outcome"] == "passed"
    assert found["digests"]["candidate"] == read_result(first)[0]["digest"]
    bounded = run("gate", first, "--baseline", first, "--min", "reward=2")
    assert bounded.exit_code == 1
    assert "must be at least 2: failed" in bounded.output
    assert run("gate", first, "--baseline", first, "--max", "reward=2").exit_code == 0
    above = run("gate", first, "--baseline", first, "--max", "reward=-1")
    assert above.exit_code == 1
    assert "must be at most -1: failed" in above.output
    assert run("gate", folder / "few", "--baseline", first).exit_code == 2
    assert run("gate", first, "--baseline", first, "--min", "reward").exit_code == 2


def test_sources_are_printed_and_the_gate_bounds_them(folder: Path) -> None:
    (folder / "hard.jsonl").write_text('{"prompt": "1234*5="}\n')
    text = EVALUATION.replace("problems.jsonl", "[hard.jsonl, problems.jsonl], source_key: task")
    (folder / "eval.yaml").write_text(text)
    done = evaluated(folder, "first")
    assert done.exit_code == 0, done.output
    assert "  reward/even[task=hard] " in done.output
    value = read_result(folder / "first")[0]["metrics"]["reward/even[task=hard]"]["value"]
    bounds = {f"--min=reward/even[task=hard]={value}": 0, f"--max=reward/even[task=hard]={value - 0.1}": 1}
    for bound, status in bounds.items():
        assert run("gate", folder / "first", "--baseline", folder / "first", bound).exit_code == status


def test_a_file_without_problems_is_refused_with_the_key(folder: Path) -> None:
    (folder / "eval.yaml").write_text("rewards: [{function: exact_match}]")
    refused = run("eval", folder / "eval.yaml", "--model", folder / "model", "--output", folder / "none")
    assert refused.exit_code == 1
    assert "data.validation is not set" in refused.output


def test_questions_of_the_training_data_are_named(folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"question": "7+7="}\n{"question": "an other one"}\n')
    done = evaluated(folder, "first", "--trained-on", str(folder / "train.jsonl"))
    assert done.exit_code == 0, done.output
    assert "warning: 1 of 30 questions have at least 50% of their 13-word sequences in" in done.stderr
    result, _ = read_result(folder / "first")
    assert result["trained_on"] == [{"training": str(folder / "train.jsonl"), "rows": 2, "questions": 1, "first": [7]}]


async def test_problems_are_made_by_the_function_of_the_spec(folder: Path) -> None:
    (folder / "own.py").write_text("def f(row):\n    return row if row['prompt'].startswith('1') else None\n")
    keys = ("data.preparation.function=./own.py:f", "grpo.val_samples_per_prompt=1")
    async with JudgeServer(by_text("even")) as server:
        model = ("--model", server.url, "--model-name", "m", "--output", folder / "made")
        done = await asyncio.to_thread(run, "eval", folder / "eval.yaml", *keys, *model)
    assert done.exit_code == 0, done.output
    assert {sample["prompt"][0] for sample in read_result(folder / "made")[1]} == {"1"}


async def test_a_model_behind_a_url_needs_no_files(folder: Path) -> None:
    (folder / "eval.yaml").write_text(EVALUATION.replace("zz]", "zz], temperature: 0.5"))
    async with JudgeServer(by_text("even")) as server:
        done = await asyncio.to_thread(
            run,
            "eval",
            folder / "eval.yaml",
            "--model",
            server.url,
            "--model-name",
            "m",
            "--output",
            folder / "url",
        )
    assert done.exit_code == 0, done.output
    result, samples = read_result(folder / "url")
    assert (result["model"], len(samples), result["metrics"]["reward"]["value"]) == ("m", 120, 1.0)
    assert result["digests"].keys() == {"samples", "spec"}
    assert {body["route"] for body in server.bodies} == {"completions"}


def test_an_evaluation_in_which_every_problem_fails_has_exit_status_1(folder: Path) -> None:
    (folder / "rewards.py").write_text("def is_even(prompts, completions, **columns):\n    raise ValueError('no')\n")
    done = evaluated(folder, "failed", "grpo.max_val_samples=2")
    assert done.exit_code == 1
    assert "0 problems, 2 failed" in done.output


HARNESS = """#!{python}
import json, sys
folder = sys.argv[sys.argv.index("--log-dir") + 1]
samples = [
    {{"id": i, "epoch": 1, "input": "q", "output": {{"completion": "a"}}, "scores": {{"same": {{"value": "CI"[i]}}}}}}
    for i in range(2)
]
about = {{"task": sys.argv[2], "packages": {{"inspect_ai": "0.3"}}}}
json.dump({{"status": "success", "eval": about, "results": {{}}, "samples": samples}}, open(folder + "/log.json", "w"))
"""


def test_a_harness_gets_the_arguments_behind_two_dashes_and_gives_a_result(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = folder / "bin" / "inspect"
    program.parent.mkdir()
    program.write_text(HARNESS.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    options = ("--with", "inspect", "--model", folder / "model", "--output", folder / "outside")
    done = run("eval", *options, "--", "task.py", "--epochs", "1")
    assert done.exit_code == 0, done.output
    result, samples = read_result(folder / "outside")
    assert result["metrics"]["reward/task.py/same"]["value"] == 0.5
    assert result["harness"]["arguments"] == ["task.py", "--epochs", "1"]
    assert result["digests"].keys() == {"model", "samples", "spec"}
    assert [sample["reward"] for sample in samples] == [1.0, 0.0]
    same = run("gate", folder / "outside", "--baseline", folder / "outside")
    assert same.exit_code == 2  # two problems decide nothing
    refused = run("eval", "--with", "inspect", "--model", "http://h/v1", "--output", folder / "no", "--", "task.py")
    assert refused.exit_code == 2
    assert "--with needs a model folder or a run" in refused.output


def test_a_spec_with_an_environment_is_refused(folder: Path) -> None:
    refused = evaluated(folder, "none", "environment.command=[agent]")
    assert refused.exit_code == 1
    assert "environment is set, but only a run samples episodes" in refused.output
    assert not (folder / "none").exists()


def test_options_of_an_endpoint_need_its_url(folder: Path) -> None:
    refused = evaluated(folder, "none", "--model-name", "m")
    assert refused.exit_code == 2
    assert "--model-name is for an endpoint" in refused.output
    nameless = run("eval", folder / "eval.yaml", "--output", folder / "none")
    assert nameless.exit_code == 2
    assert "Missing option '--model'" in nameless.output

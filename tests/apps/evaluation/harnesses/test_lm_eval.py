"""lm-eval's command line for an endpoint, and the files that its version 0.4.13 writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.apps.evaluation.harnesses import lm_eval_command as command
from paceline.apps.evaluation.harnesses import read_lm_eval as read
from paceline.apps.evaluation.harnesses import result_of
from paceline.errors import InvalidInput

STAMP = "2026-11-25T15-16-27.114101"


def choice(index: int, logprobs: list[float], acc: float, acc_norm: float) -> dict[str, Any]:
    return {
        "doc_id": index,
        "arguments": {
            f"gen_args_{place}": {"arg_0": f"Question {index}", "arg_1": f" {place}"} for place in range(len(logprobs))
        },
        "filtered_resps": [[str(each), "False"] for each in logprobs],
        "filter": "none",
        "metrics": ["acc", "acc_norm"],
        "acc": acc,
        "acc_norm": acc_norm,
    }


def generation(index: int, filter_name: str, score: float) -> dict[str, Any]:
    return {
        "doc_id": index,
        "arguments": {"gen_args_0": {"arg_0": f"Sum {index}", "arg_1": {"until": []}}},
        "filtered_resps": ["7"],
        "filter": filter_name,
        "metrics": ["exact_match", "words"],
        "exact_match": score,
        "words": ["seven"],
    }


def write(folder: Path, task: str, rows: list[dict[str, Any]]) -> None:
    (folder / "tiny").mkdir(exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "tiny" / f"samples_{task}_{STAMP}.jsonl").write_text(lines)
    results = {"results": {task: {"acc,none": 0.5}}, "lm_eval_version": "0.4.13"}
    (folder / "tiny" / f"results_{STAMP}.json").write_text(json.dumps(results))


def test_choices_and_filters_are_samples_with_their_scores(tmp_path: Path) -> None:
    many = [-1.0 * place for place in range(12, 0, -1)]
    write(tmp_path, "a_task", [choice(0, [-3.0, -1.0], 1.0, 0.0), choice(1, many, 0.0, 1.0)])
    write(tmp_path, "sums", [generation(0, "strict", 0.0), generation(0, "flexible", 1.0)])
    run = read(tmp_path)
    assert run.version == "0.4.13"
    first, second, third = run.samples
    assert (first.task, first.prompt, first.completion) == ("a_task", "Question 0", " 1")
    assert first.scores == {"acc": 1.0, "acc_norm": 0.0}
    assert first.choices[0] == {"logprob": -3.0, "is_greedy": False}
    assert second.completion == " 11"  # the answers are in the order of their numbers
    assert (third.task, third.completion) == ("sums", "7")
    assert third.scores == {"exact_match,strict": 0.0, "exact_match,flexible": 1.0}
    result, samples = result_of(run, "lm-eval", ["--tasks", "a_task,sums"], "model", 0)
    assert result["metrics"]["reward/a_task/acc"]["value"] == 0.5
    assert result["metrics"]["reward/sums/exact_match,flexible"]["value"] == 1.0
    assert result["problems"] == 3
    assert samples[2]["rewards"]["a_task/acc"] is None
    assert samples[0]["reward"] == 1.0


def test_the_endpoint_is_added_to_the_users_arguments(tmp_path: Path) -> None:
    found = command("http://h/v1", "tiny", "/model, with a comma", tmp_path, ["--tasks", "a"])
    assert found[:3] == ["run", "--model", "local-completions"]
    settings = json.loads(found[found.index("--model_args") + 1])
    assert (settings["base_url"], settings["tokenizer"]) == (
        "http://h/v1/completions",
        "/model, with a comma",
    )
    assert found[-2:] == ["--tasks", "a"]
    chat = command("http://h/v1", "tiny", "m", tmp_path, ["--model", "local-chat-completions"])
    assert chat.count("--model") == 1
    assert "http://h/v1/chat/completions" in chat[chat.index("--model_args") + 1]
    with pytest.raises(InvalidInput, match="--model hf after -- is not the endpoint"):
        command("http://h/v1", "tiny", "m", tmp_path, ["--model", "hf"])


def test_a_run_without_results_or_scores_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="has written no results"):
        read(tmp_path)
    write(tmp_path, "empty", [])
    with pytest.raises(InvalidInput, match="has no scores of single samples"):
        result_of(read(tmp_path), "lm-eval", [], "model", 0)

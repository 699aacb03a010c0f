"""data inspect: counts, what is left out, samples that cannot move the cursor, and test questions among the training data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import character_tokenizer
from command_line import paceline
from tokenizer_kinds import tokenizer_of

ROOT = Path(__file__).parents[3]
RECORDED = ROOT.parent / "shared" / "data" / "gsm8k"


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def spec_of(folder: Path, algorithm: str, **data: str) -> Path:
    path = folder / "spec.yaml"
    keys = ", ".join(f"{key}: {value}" for key, value in data.items())
    path.write_text(f"algorithm: {algorithm}\npolicy: {{model_name: none}}\ndata: {{{keys}}}\n")
    return path


def test_test_questions_among_the_training_data_are_warned_of(tmp_path: Path) -> None:
    questions = [f"Ann has {n} pens and buys {n + 1} more. How many has she?" for n in range(4)]
    write(
        tmp_path / "train.jsonl",
        [{"prompt": q, "completion": "\x1b[2J7"} for q in [*questions[:2], "How are you?"]],
    )
    write(tmp_path / "test.jsonl", [{"question": q, "answer": "7"} for q in questions])
    spec = spec_of(tmp_path, "sft", train="./train.jsonl")
    result = paceline("data", "inspect", spec)
    assert result.exit_code == 0, result.output
    assert "data.train: 3 rows with the columns prompt, completion" in result.output
    assert "warning: 2 rows of data.train" in result.output
    assert "\\x1b[2J7" in result.output
    facts = json.loads(paceline("data", "inspect", spec, "--json").stdout)
    (overlap,) = facts["overlap"]
    assert (overlap["rows"], overlap["compared"], overlap["first"]) == (2, 3, 0)
    assert facts["samples"][2]["parts"] == [["How are you?", False], ["\\x1b[2J7", True]]
    assert facts["train"]["format"] == "prompts with completions, in the format TRL's prompt-completion, standard"


def test_gold_answers_without_a_score_are_warned_of(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"prompt": "2+2=", "answer": each} for each in ("4", None)])
    spec = spec_of(tmp_path, "grpo", train="./train.jsonl")
    result = paceline("data", "inspect", spec, "rewards=[{function: math_accuracy}]")
    assert result.exit_code == 0, result.output
    assert "warning: math_accuracy gives no score to 1 of the first 2 rows of data.train (50.0%)" in result.output


def test_traces_say_what_is_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": p, "completion": f"{r}", "final_reward": r} for p, r in [("a", 1), ("a", 0), ("b", 1)]]
    write(tmp_path / "traces.jsonl", rows)
    result = paceline("data", "inspect", spec_of(tmp_path, "offline_grpo", train="./traces.jsonl"))
    assert "1 group of 2 traces" in result.output
    assert "left out: 1 (only trace of its prompt)" in result.output


def test_the_recorded_solutions_belong_to_test_questions(tmp_path: Path) -> None:
    if not RECORDED.is_dir():
        pytest.skip("the recorded solutions are not on this machine")
    (tmp_path / "test.jsonl").write_bytes((RECORDED / "test.jsonl").read_bytes())
    solutions = (RECORDED / "example_model_solutions.jsonl").read_text().splitlines()
    rows = [{"prompt": row["question"], "completion": row["ground_truth"]} for row in map(json.loads, solutions)]
    write(tmp_path / "solutions.jsonl", rows)
    spec = spec_of(tmp_path, "sft", train="./solutions.jsonl")
    (overlap,) = json.loads(paceline("data", "inspect", spec, "--json").stdout)["overlap"]
    assert (overlap["rows"], overlap["compared"]) == (1319, 1319)


def test_a_stream_shows_its_first_block(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl", [{"prompt": f"p{n}", "answer": n} for n in range(30)])
    data = {"train": "./set", "streaming": "true", "streaming_block_rows": "8"}
    result = paceline("data", "inspect", spec_of(tmp_path, "grpo", **data), "rewards=[{function: exact_match}]")
    assert result.exit_code == 0, result.output
    assert "data.train: the first 8 rows of a stream, with the columns prompt, answer" in result.output


CHATML = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
ROWS: dict[str, dict[str, Any]] = {
    "sft": {"messages": CHAT},
    "dpo": {"chosen": CHAT, "rejected": [CHAT[0], {"role": "assistant", "content": "5"}]},
    "kto": {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
    "offline_grpo": {"prompt": CHAT[:1], "completion": "4", "final_reward": 1.0},
}


@pytest.mark.parametrize(("algorithm", "row"), ROWS.items())
def test_samples_show_what_trains(tmp_path: Path, algorithm: str, row: dict[str, Any]) -> None:
    worse = {**row, "final_reward": 0.0, "completion": "5"} if algorithm == "offline_grpo" else row
    write(tmp_path / "train.jsonl", [row, worse])
    facts = json.loads(
        paceline("data", "inspect", spec_of(tmp_path, algorithm, train="./train.jsonl"), "--json").stdout
    )
    (read, trained, *_) = facts["samples"][0]["parts"]
    assert read == ["2+2=" if algorithm == "kto" else "<user> 2+2?\n", False]
    assert trained == ["4" if algorithm == "kto" else "<assistant> 4\n", True]
    assert facts["train"]["prompt_characters"]["max"] == 4, "an implicit prompt is one too"


def test_samples_as_tokens_have_the_template_and_a_mask(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(CHATML)
    tokenizer.save_pretrained(tmp_path / "model")
    write(tmp_path / "train.jsonl", [{"messages": CHAT}, {"messages": [*CHAT, *CHAT]}])
    spec = spec_of(tmp_path, "sft", train="./train.jsonl")
    options = (f"policy.model_name={tmp_path / 'model'}", "--tokens")
    first, second = json.loads(paceline("data", "inspect", spec, *options, "--json").stdout)["samples"]
    assert [trains for _, trains in first["parts"]] == [False, True]
    assert first["parts"][1][0].startswith("4")
    assert first["tokens"] > first["trained_tokens"] >= 2
    masked = json.loads(
        paceline(
            *(
                "data",
                "inspect",
                spec,
                *options,
                "data.messages_key=messages",
                "sft.loss_mask=assistant",
                "--json",
            )
        ).stdout
    )["samples"][1]
    assert [trains for _, trains in masked["parts"]] == [False, True, False, True]
    assert second["trained_tokens"] < masked["trained_tokens"]
    result = paceline("data", "inspect", spec, *options)
    assert f"  {first['tokens']:,} tokens, of which {first['trained_tokens']:,} are trained" in result.output


def test_a_mixture_shows_the_share_of_each_source(tmp_path: Path) -> None:
    for name, number in (("math", 3), ("code", 30)):
        write(tmp_path / f"{name}.jsonl", [{"prompt": f"{name} {n}", "completion": "c"} for n in range(number)])
    spec = spec_of(tmp_path, "sft", train="[./math.jsonl, ./code.jsonl]", train_weights="[3, 1]")
    result = paceline("data", "inspect", spec)
    assert "  math: 3 rows, 75.0% of the draws\n  code: 30 rows, 25.0% of the draws\n" in result.output


def test_a_text_that_the_tokenizer_does_not_keep_is_a_warning(tmp_path: Path) -> None:
    tokenizer_of("strips").save_pretrained(tmp_path / "model")
    write(
        tmp_path / "train.jsonl",
        [{"prompt": "say", "completion": " yes"}, {"prompt": "a  b", "completion": "c"}],
    )
    spec = spec_of(tmp_path, "sft", train="./train.jsonl")
    result = paceline("data", "inspect", spec, f"policy.model_name={tmp_path / 'model'}", "--tokens")
    assert result.exit_code == 0, result.output
    assert "warning: row 1: the tokenizer does not preserve the text 'a  b': the text becomes 'a b'" in result.output
    assert "row 0" not in result.output

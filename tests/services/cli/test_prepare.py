"""data prepare: rows by a function and filters, with every reason counted; pass rates come from a run's ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import paceline
from exchange_drivers import COMMITTED, MakeWorld, Reward, Rollout

QUESTION = "Ann has {} pens and buys {} more at the shop, how many pens has she got in the end?"


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    rows = [{"prompt": QUESTION.format(n, n), "answer": n} for n in range(6)] + [{"prompt": "x" * 500, "answer": 7}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": QUESTION.format(3, 3)}) + "\n")
    (tmp_path / "own.py").write_text(
        "def double(row):\n    return row | {'answer': 2 * row['answer']} if row['answer'] else None\n"
    )
    path = tmp_path / "spec.yaml"
    path.write_text(
        "policy: {model_name: none}\ndata: {train: ./train.jsonl}\nrewards: [{function: exact_match}]\n"
        "grpo: {num_prompts_per_step: 2, max_num_steps: 2}\n"
    )
    return path


def keys(**values: object) -> list[str]:
    return [f"data.preparation.{name}={value}" for name, value in values.items()]


def prepared(spec: Path, *options: object) -> tuple[list[dict[str, Any]], dict[str, int]]:
    out = spec.parent / "prepared.jsonl"
    result = paceline("data", "prepare", spec, out, *options, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert facts["rows"] == len(rows)
    return rows, facts["left_out"]


def test_a_function_and_filters_say_what_they_leave_out(spec: Path) -> None:
    function = f"{spec.parent / 'own.py'}:double"
    rows, left_out = prepared(spec, *keys(function=function, max_prompt_characters=200, max_overlap=0.9))
    assert [row["answer"] for row in rows] == [2, 4, 8, 10]
    assert left_out == {
        "by the function": 1,
        "prompt of more than 200 characters": 1,
        f"prompt that overlaps with {spec.parent / 'test.jsonl'}": 1,
    }


def test_pass_rates_of_a_run_choose_prompts(spec: Path, make_world: MakeWorld) -> None:
    data = {"train": str(spec.parent / "train.jsonl"), "shuffle": False}
    world = make_world(data=data, grpo={"use_dynamic_sampling": True})
    rollout, reward = Rollout(world), Reward(world)
    for lease in rollout.lease(8):
        assert rollout.finish(lease) == COMMITTED
    rates = {}
    for task, values in zip(reward.tasks(), ([1, 1], [0, 0], [1, 0]), strict=False):
        assert reward.score(task, [float(value) for value in values]) == COMMITTED
        rates[task.group_id] = sum(values) / 2
    options = keys(pass_rate="[0.1,0.9]", pass_rate_of=f"[{world.run_id}]")
    _, left_out = prepared(spec, *options, "--directory", world.path.parent)
    assert left_out == {
        "pass rate above 0.9": sum(rate == 1 for rate in rates.values()),
        "pass rate below 0.1": sum(rate == 0 for rate in rates.values()),
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pass_rate": "[0.1,0.9]"}, "only pass_rate is set; set both pass_rate and pass_rate_of"),
        ({"max_prompt_characters": 1}, "leaves no row; left out: 7 (prompt of more than 1 characters)"),
        ({}, "data.preparation is empty, so nothing changes"),
    ],
)
def test_what_leaves_nothing_is_refused(spec: Path, options: dict[str, object], message: str) -> None:
    out = spec.parent / "prepared.jsonl"
    result = paceline("data", "prepare", spec, out, *keys(**options))
    assert result.exit_code != 0
    assert message in result.output
    assert not out.exists()


def test_the_overlap_needs_a_set(spec: Path) -> None:
    (spec.parent / "test.jsonl").unlink()
    result = paceline("data", "prepare", spec, spec.parent / "prepared.jsonl", *keys(max_overlap=0.5))
    assert "max_overlap is 0.5, but there is no evaluation set; set data.validation, or put" in result.output


def test_an_implicit_prompt_is_compared_and_a_malformed_row_is_named(tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": "4"}] for text in ("2+2?", "x" * 99)]
    rows = [{"chosen": chat, "rejected": [chat[0], {"role": "assistant", "content": "5"}]} for chat in chats]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path, out = tmp_path / "spec.yaml", tmp_path / "out.jsonl"
    path.write_text("algorithm: dpo\npolicy: {model_name: none}\ndata: {train: ./train.jsonl}\n")
    result = paceline("data", "prepare", path, out, *keys(max_prompt_characters=50))
    assert "left out: 1 row (prompt of more than 50 characters)" in result.output
    (tmp_path / "own.py").write_text(
        "def spoil(row):\n    return {'chosen': row['chosen'], 'rejected': row['chosen']}\n"
    )
    result = paceline("data", "prepare", path, out, *keys(function=f"{tmp_path / 'own.py'}:spoil"))
    assert result.exit_code == 1
    assert "row 0: 'chosen' and 'rejected' must begin with the same messages" in result.output

"""A usual GRPO script with five usual reward functions: `paceline import` moves its settings, and its functions score."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from paceline.apps.importers.import_spec import import_config, spec_text
from paceline.reward.calling import call_function, load_function
from paceline.spec import RunSpec
from paceline.spec.reading import load_spec

SCRIPT = '''
import re

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

PATTERN = re.compile(r"<think>.+?</think>\\\\s*<answer>.+?</answer>", re.DOTALL)


def texts_of(completions):
    return [each if isinstance(each, str) else each[0]["content"] for each in completions]


def follows_format(completions, **kwargs):
    """On chats: the layout by a pattern."""
    return [1.0 if PATTERN.fullmatch(messages[0]["content"]) else 0.0 for messages in completions]


def right_answer(completions, solution, **kwargs):
    """The number after the last sign of equality."""
    found = [re.findall(r"-?\\\\d+", text) for text in texts_of(completions)]
    return [float(bool(numbers) and numbers[-1] == right) for numbers, right in zip(found, solution)]


def near_length(prompts, completions, completion_ids, target=3, **kwargs):
    return [-abs(len(ids) - target) / target for ids in completion_ids]


def compiles(completions, task, **kwargs):
    """Code only: None where the task is another."""
    scores = []
    for text, kind in zip(texts_of(completions), task):
        if kind != "code":
            scores.append(None)
            continue
        try:
            compile(text, "answer", "exec")
            scores.append(1.0)
        except SyntaxError:
            scores.append(0.0)
    return scores


async def polite(completions, log_metric=None, **kwargs):
    return [0.5 if "please" in text else 0 for text in texts_of(completions)]


if __name__ == "__main__":
    arguments = GRPOConfig(
        output_dir="out",
        learning_rate=1e-3,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_prompt_length=48,
        max_completion_length=16,
        max_steps=3,
        beta=0.0,
        epsilon=0.2,
        reward_weights=[0.2, 1.0, 0.1, 0.5, 0.1],
        logging_steps=1,
        bf16=False,
        report_to="none",
    )
    GRPOTrainer(
        model="./model",
        args=arguments,
        reward_funcs=[follows_format, right_answer, near_length, compiles, polite],
        train_dataset=load_dataset("json", data_files="train.jsonl", split="train"),
    ).train()
'''
CHAT = [[{"role": "assistant", "content": text}] for text in ("<think>x</think><answer>4</answer>", "please 5")]
GROUP: dict[str, Any] = {
    "prompts": [[{"role": "user", "content": "2+2="}]] * 2,
    "completions": CHAT,
    "completion_ids": [[1, 2, 3], [1, 2, 3, 4, 5, 6]],
    "columns": {"solution": ["4", "4"], "task": ["math", "code"]},
}
EXPECTED = {
    "follows_format": [1.0, 0.0],
    "right_answer": [1.0, 0.0],
    "near_length": [0.0, -1.0],
    "compiles": [None, 0.0],
    "polite": [0.0, 0.5],
}


@pytest.fixture
def moved(tmp_path: Path) -> RunSpec:
    """The spec that `paceline import trl` writes for the script, with the file of functions beside it."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("\\\\", "\\"))
    (tmp_path / "model").mkdir()
    (tmp_path / "train.jsonl").write_text('{"prompt": "2+2=", "solution": "4", "task": "math"}\n')
    done = import_config("trl", script)
    written = tmp_path / "run.yaml"
    written.write_text(spec_text(done, script))
    for name, text in done.files.items():
        (tmp_path / name).write_text(text)
    return load_spec(written)


def test_the_settings_move(moved: RunSpec, tmp_path: Path) -> None:
    assert (moved.policy.model_name, moved.data.train) == (f"{tmp_path}/model", f"{tmp_path}/train.jsonl")
    assert (moved.grpo.num_prompts_per_step, moved.grpo.num_generations_per_prompt) == (4, 4)
    assert (moved.grpo.max_num_steps, moved.policy.num_updates_per_step) == (3, 1)
    assert (moved.policy.max_total_sequence_length, moved.policy.generation.max_new_tokens) == (64, 16)
    assert (moved.policy.optimizer.lr, moved.policy.precision) == (1e-3, "float32")
    assert [reward.weight for reward in moved.rewards] == [0.2, 1.0, 0.1, 0.5, 0.1]


def test_the_functions_score_a_chat_as_in_the_script(moved: RunSpec) -> None:
    scores = {
        reward.label: call_function(load_function(reward.function), GROUP, {}, asyncio.run) for reward in moved.rewards
    }
    assert scores == EXPECTED


def test_the_functions_that_read_texts_score_a_text(moved: RunSpec) -> None:
    text = GROUP | {"prompts": ["2+2="] * 2, "completions": [each[0]["content"] for each in CHAT]}
    functions = {reward.label: load_function(reward.function) for reward in moved.rewards[1:]}
    scores = {name: call_function(function, text, {}, asyncio.run) for name, function in functions.items()}
    assert scores == {name: EXPECTED[name] for name in functions}

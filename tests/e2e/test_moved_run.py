"""A script for TRL's GRPO moves over: `paceline import` reads it without running it, and the spec that it writes trains with
the script's reward functions as they stand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import paceline

from paceline.client import Client, RunState
from paceline.spec import RunSpec
from paceline.spec.reading import load_spec

SCRIPT = '''
import re

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

TAGS = re.compile(r"<think>.*?</think><answer>.*?</answer>", re.DOTALL)


def tags_reward(completions, **kwargs):
    """Chat: a completion is a list of messages."""
    return [1.0 if TAGS.search(completion[0]["content"]) else 0.0 for completion in completions]


def length_reward(completions, log_metric=None, log_extra=None, **kwargs):
    """Texts or chats, with loggers that older versions of the library do not pass."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    if log_metric:
        log_metric("characters", sum(map(len, texts)) / len(texts))
    if log_extra:
        log_extra("length", [len(text) for text in texts])
    return [-abs(20 - len(text)) / 20 for text in texts]


def answer_reward(prompts, completions, answer, trainer_state=None, **kwargs):
    """A column of the data set, and the state of the training."""
    assert trainer_state is None or trainer_state.global_step >= 0
    return [float(expected in completion) for completion, expected in zip(completions, answer)]


def sums_only(prompts, completions, task, **kwargs):
    """None for rows of another task."""
    return [len(set(text)) / 10 if kind == "sum" else None for text, kind in zip(completions, task)]


async def products_only(completions, completion_ids, task, **kwargs):
    return [len(ids) / 10 if kind == "product" else None for ids, kind in zip(completion_ids, task)]


def main():
    config = GRPOConfig(
        output_dir="out",
        learning_rate=1e-4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        num_generations=4,
        max_prompt_length=200,
        max_completion_length=12,
        max_steps=2,
        beta=0.01,
        loss_type="dapo",
        bf16=False,
        use_vllm=True,
        vllm_mode="colocate",
        gradient_checkpointing=True,
        logging_steps=1,
        report_to="wandb",
    )
    trainer = GRPOTrainer(
        model=MODEL,
        args=config,
        reward_funcs=[FUNCTIONS],
        train_dataset=load_dataset("json", data_files="rows.jsonl", split="train"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
'''
TEXTS = ["length_reward", "answer_reward", "sums_only", "products_only"]
CHATS = ["tags_reward", "length_reward"]


@pytest.mark.merge
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["texts", "chats"])
def test_a_script_for_trl_trains_here(
    client: Client,
    make_spec: Callable[..., RunSpec],
    chat_model: Path,
    tmp_path: Path,
    kind: str,
) -> None:
    model, functions = (chat_model, CHATS) if kind == "chats" else (make_spec().policy.model_name, TEXTS)
    text = SCRIPT.replace("FUNCTIONS", ", ".join(functions)).replace("MODEL", repr(str(model)))
    (tmp_path / "train.py").write_text(text)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{a}+3="}] if kind == "chats" else f"0{a}+03=",
            "answer": str(a + 3),
            "task": "sum" if a % 2 else "product",
        }
        for a in range(1, 7)
        for _ in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    imported = paceline("import", "trl", tmp_path / "train.py", "policy.generation.backend=native")
    assert imported.exit_code == 0, imported.output
    assert "left out: report_to ('wandb')" in imported.stderr
    spec = load_spec(tmp_path / "train.paceline.yaml")
    assert (spec.grpo.num_prompts_per_step, spec.grpo.max_num_steps) == (4, 2)
    assert [reward.function.rpartition(":")[2] for reward in spec.rewards] == functions

    run = client.wait(client.submit(spec).run_id, timeout_s=180)
    assert RunState.of(run) is RunState.SUCCEEDED, run.message
    last = client.metrics(run.run_id)
    assert [name for name in functions if f"reward/{name}" not in last] == []
    for completion in client.groups(run.run_id, 1)[0]["completions"]:
        assert completion["extra"] == {"length": len(completion["text"])}

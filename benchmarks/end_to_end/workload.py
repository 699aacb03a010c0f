"""The input of both sides: a model, its tokenizer, and the prompts. The model is random and stops at a known rate, or it is a
pretrained chat model with the questions of a data set.

Promise: both sides read the same files, so they sample from the same distribution of lengths. Nothing is masked or
forced at generation: the end of sequence gets its probability from the weights themselves.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from datasets import load_dataset
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.services.demo.task import CHARACTERS, make_model, write_data

SEED = 0
NUM_PROMPTS = 4096
REWARD_FILE = Path(__file__).with_name("reward.py")
REWARD_NAME = "share_of_small_digits"


@dataclass(frozen=True)
class Workload:
    """The numbers of the load; the same for both sides."""

    hidden: int = 256
    layers: int = 4
    prompts_per_step: int = 32
    completions_per_prompt: int = 8
    max_prompt_tokens: int = 8
    max_new_tokens: int = 128
    mean_length: float = 85.0
    """Wanted mean number of tokens of a completion, its end of sequence included."""
    temperature: float = 1.0
    learning_rate: float = 1e-6
    """Small, so that the lengths stay as they are while it is measured."""
    trl_micro_batch: int = 64
    """Sequences of a forward and backward pass of TRL."""

    @property
    def completions_per_step(self) -> int:
        """Sequences in one optimizer step."""
        return self.prompts_per_step * self.completions_per_prompt


PRETRAINED = Workload(prompts_per_step=8, max_prompt_tokens=256, max_new_tokens=64, trl_micro_batch=16)
"""For a model of 135M parameters. `hidden`, `layers` and `mean_length` are not read."""


def write_workload(directory: Path, workload: Workload) -> None:
    """Writes a random model/, prompts.jsonl, workload.json and reward.json to `directory`."""
    make_model(directory / "model", seed=SEED, hidden=workload.hidden, layers=workload.layers)
    _fix_stop_rate(directory / "model", stop_probability(workload.mean_length, workload.max_new_tokens))
    write_data(directory / "task", SEED)
    rows = [json.loads(line) for line in (directory / "task" / "train.jsonl").read_text().splitlines()]
    _write_prompts(directory, workload, [row["prompt"] for row in rows[:NUM_PROMPTS]])


def write_pretrained(directory: Path, workload: Workload, model: str, questions: str) -> None:
    """Writes the same files for a chat model (a folder, or a name on the hub). `questions` is a JSONL file or a data set on
    the hub with the column `question`; the model's chat template makes the prompts, and long ones are left out."""
    folder = Path(model if Path(model).is_dir() else snapshot_download(model))
    (directory / "model").symlink_to(folder.resolve())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    kind = (
        {"path": "json", "data_files": questions} if Path(questions).is_file() else {"path": questions, "name": "main"}
    )
    prompts = []
    for question in load_dataset(**kind, split="train")["question"]:
        message = {"role": "user", "content": question}
        prompt = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        if len(tokenizer(prompt).input_ids) <= workload.max_prompt_tokens and len(prompts) < NUM_PROMPTS:
            prompts.append(prompt)
    _write_prompts(directory, workload, prompts)


def _write_prompts(directory: Path, workload: Workload, prompts: list[str]) -> None:
    lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    (directory / "prompts.jsonl").write_text(lines)
    (directory / "workload.json").write_text(json.dumps(asdict(workload)))
    reward = {"file": str(REWARD_FILE), "name": REWARD_NAME}
    (directory / "reward.json").write_text(json.dumps(reward))


def stop_probability(mean_length: float, max_new_tokens: int) -> float:
    """p of a stop at each token for which lengths, cut at L = `max_new_tokens`, have this mean.

    The length is geometric, cut at L: mean = (1 − (1 − p)^L) / p, which falls from L to 1 as p grows. By bisection.
    """
    low, high = 1e-9, 1.0
    for _ in range(60):
        p = (low + high) / 2
        low, high = (p, high) if (1 - (1 - p) ** max_new_tokens) / p > mean_length else (low, p)
    return low


@torch.no_grad()
def _fix_stop_rate(directory: Path, probability: float) -> None:
    """Sets the LM head's row of the end of sequence so that its probability is about `probability` everywhere.

    Random weights would stop at about one token in 14 and make completions of 13 tokens. The row is w·c, where w solves
    h·w = 1 for the hidden states h of random text (least squares), and c is the logit with which the probability has
    this mean over them.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    end = tokenizer.eos_token_id
    characters = torch.tensor([tokenizer.convert_tokens_to_ids(c) for c in CHARACTERS])
    generator = torch.Generator().manual_seed(SEED)
    ids_BT = characters[torch.randint(len(characters), (128, 134), generator=generator)]
    hidden_NH = model.model(input_ids=ids_BT).last_hidden_state.flatten(0, 1).double()
    head_VH = model.get_output_embeddings().weight
    ones_N1 = torch.ones(len(hidden_NH), 1, dtype=torch.float64)
    direction_H = torch.linalg.lstsq(hidden_NH, ones_N1).solution[:, 0]
    others_V = torch.arange(len(head_VH)) != end
    log_sum_N = (hidden_NH @ head_VH[others_V].double().T).logsumexp(-1)
    scale = -1.0
    for _ in range(10):
        mean_probability = (scale * (hidden_NH @ direction_H) - log_sum_N).sigmoid().mean().item()
        scale += math.log(probability / mean_probability)
    head_VH[end] = (direction_H * scale).float()
    model.save_pretrained(directory)

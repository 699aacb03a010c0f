"""The input of both sides: a random model that stops at a known rate, its tokenizer, and the prompts.

Promise: both sides read the same files, so they sample from the same distribution of lengths. Nothing is masked or
forced at generation: the end of sequence gets its probability from the weights themselves.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
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
    max_new_tokens: int = 128
    mean_length: float = 85.0
    """Wanted mean number of tokens of a completion, its end of sequence included."""
    temperature: float = 1.0
    learning_rate: float = 1e-6
    """Small, so that the lengths stay as they are while it is measured."""

    @property
    def completions_per_step(self) -> int:
        """Sequences in one optimizer step."""
        return self.prompts_per_step * self.completions_per_prompt


def write_workload(directory: Path, workload: Workload) -> None:
    """Writes model/, prompts.jsonl, workload.json and reward.json to `directory`."""
    make_model(directory / "model", seed=SEED, hidden=workload.hidden, layers=workload.layers)
    _fix_stop_rate(directory / "model", stop_probability(workload.mean_length, workload.max_new_tokens))
    write_data(directory / "task", SEED)
    rows = [json.loads(line) for line in (directory / "task" / "train.jsonl").read_text().splitlines()]
    prompts = "".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows[:NUM_PROMPTS])
    (directory / "prompts.jsonl").write_text(prompts)
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

"""Log-probabilities of continuations by transformers itself, without any of Paceline's code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class TransformersScore(NamedTuple):
    logprob: float
    is_greedy: bool


def scores_by_transformers(folder: Path, prompt: str, continuations: Sequence[str]) -> list[TransformersScore]:
    """Return sum and greediness of each continuation's tokens after `prompt`, white space at its end belonging to them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    kept = prompt.rstrip()
    start = len(tokenizer(kept)["input_ids"])
    found = []
    for each in continuations:
        ids = tokenizer(prompt + each)["input_ids"]
        with torch.inference_mode():
            logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        own = [logprobs[place - 1, ids[place]].item() for place in range(start, len(ids))]
        likeliest = [logprobs[place - 1].argmax().item() for place in range(start, len(ids))]
        found.append(TransformersScore(sum(own), likeliest == ids[start:]))
    return found

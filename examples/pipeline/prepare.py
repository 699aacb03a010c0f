"""Makes the inputs of the specs beside this file: ./model and ./data.

The task is `07+45=` → `250`: the sum's digits, least significant first. The model is a two-layer Qwen3 with random weights
and one token a character. The problems are divided by a hash of the prompt, so none is in two files:

    demonstrations.jsonl        prompt, completion     for sft.yaml; half of the completions are wrong
    pairs.jsonl                 prompt, chosen, rejected     what raters prefer, for rm.yaml
    pairs_held_out.jsonl        the same of other problems, to measure the reward model
    prompts.jsonl               prompt                 for grpo.yaml, which has no answers
    problems.jsonl              prompt, answer         for eval.yaml
    requests.jsonl              prompt, answer         what users ask the served models

You do not need this file with your own model and data.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SEED = 0
DIGITS = "0123456789"
END, PAD = "<end>", "<pad>"
ERROR_RATE = 0.5
REQUEST_SHARE, PROBLEM_SHARE = 10, 10
"""Percent of the problems."""


def make_data(folder: Path, seed: int) -> None:
    """Write the data files."""
    dice = random.Random(seed)
    rows: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("demonstrations", "pairs", "pairs_held_out", "prompts", "problems", "requests")
    }
    sums = [(a, b) for a in range(100) for b in range(100)]
    dice.shuffle(sums)
    for a, b in sums:
        prompt, right = f"{a:02d}+{b:02d}=", f"{a + b:03d}"[::-1]
        wrong = with_error(right, dice)
        pair = {"prompt": prompt, "chosen": right, "rejected": wrong}
        percent = hashlib.sha256(prompt.encode()).digest()[0] * 100 // 256
        if percent < REQUEST_SHARE:
            rows["requests"].append({"prompt": prompt, "answer": right})
        elif percent < REQUEST_SHARE + PROBLEM_SHARE:
            rows["problems"].append({"prompt": prompt, "answer": right})
            rows["pairs_held_out"].append(pair)
        else:
            shown = wrong if dice.random() < ERROR_RATE else right
            rows["demonstrations"].append({"prompt": prompt, "completion": shown})
            rows["pairs"].append(pair)
            rows["prompts"].append({"prompt": prompt})
    folder.mkdir(parents=True, exist_ok=True)
    for name, found in rows.items():
        lines = "".join(json.dumps(row) + "\n" for row in found)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def with_error(right: str, dice: random.Random) -> str:
    """Return an answer with one wrong digit."""
    index = dice.randrange(len(right))
    digit = dice.choice([each for each in DIGITS if each != right[index]])
    return right[:index] + digit + right[index + 1 :]


def make_model(folder: Path, seed: int) -> None:
    """Write a model with random weights and its tokenizer."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {token: index for index, token in enumerate([PAD, END, *DIGITS, "+", "="])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    characters.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_object=characters, eos_token=END, pad_token=PAD, unk_token=PAD)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.05,  # at the usual 0.02 a model this small learns nothing for thousands of steps
        tie_word_embeddings=False,
        eos_token_id=vocabulary[END],
        pad_token_id=vocabulary[PAD],
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # safetensors makes its files readable only for their owner.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")


if __name__ == "__main__":
    make_data(HERE / "data", SEED)
    make_model(HERE / "model", SEED)
    print(f"{HERE}: model/ and data/ exist")

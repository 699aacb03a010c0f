"""The demo's task: `07+45=` → `250`, the sum's digits, least significant first, so that a left-to-right model works
with one carry at a time. Problems are held out by a hash of the prompt, so no training answer ever shows a held-out
one. The model is a two-layer Qwen3 with random weights, and the tokenizer has one token a character."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

DIGITS = "0123456789"
HELD_OUT_OF_TEN = 1
TEACHER_ERROR_RATE = 0.5


def answer(a: int, b: int) -> str:
    """Return the right completion of `problem(a, b)`: three digits, least significant first."""
    return f"{a + b:03d}"[::-1]


def problem(a: int, b: int) -> str:
    return f"{a:02d}+{b:02d}="


def is_held_out(prompt: str) -> bool:
    return hashlib.sha256(prompt.encode()).digest()[0] % 10 < HELD_OUT_OF_TEN


def teach(right: str, dice: random.Random) -> str:
    """Return the teacher's answer: in half of the cases another digit replaces a digit of `right`."""
    if dice.random() >= TEACHER_ERROR_RATE:
        return right
    place = dice.randrange(len(right))
    wrong = dice.choice([digit for digit in DIGITS if digit != right[place]])
    return right[:place] + wrong + right[place + 1 :]


def write_data(directory: Path, seed: int) -> None:
    """Write train.jsonl (prompt, the teacher's completion, the right answer) and validation.jsonl."""
    directory.mkdir(parents=True, exist_ok=True)
    dice = random.Random(seed)
    pairs = [(a, b) for a in range(100) for b in range(100)]
    dice.shuffle(pairs)
    with (directory / "train.jsonl").open("w") as train, (directory / "validation.jsonl").open("w") as held_out:
        for a, b in pairs:
            row = {"prompt": problem(a, b), "completion": teach(answer(a, b), dice), "answer": answer(a, b)}
            (held_out if is_held_out(row["prompt"]) else train).write(json.dumps(row) + "\n")


CHARACTERS = DIGITS + "+="
END, PAD = "<end>", "<pad>"


def make_tokenizer(characters: str = CHARACTERS) -> Any:
    """Return a tokenizer of these characters, each a token, whose end of sequence is `<end>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, END, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, unk_token=PAD)


def make_model(
    directory: Path, *, seed: int, hidden: int = 128, layers: int = 2, heads: int = 4, characters: str = CHARACTERS
) -> None:
    """Write a randomly initialised model with its tokenizer to `directory`. initializer_range is 0.05, because at the
    usual 0.02 a model this small stays on a plateau for thousands of steps."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    tokenizer = make_tokenizer(characters)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=256,
        initializer_range=0.05,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    disable_progress_bar()  # type: ignore[no-untyped-call]
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    # safetensors makes files readable only by their owner, but containers read this one as another user.
    shutil.copymode(directory / "config.json", directory / "model.safetensors")

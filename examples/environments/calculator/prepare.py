"""Makes the inputs of the two specs beside this file: ./model and ./data.

The model is a two-layer Qwen3 with random weights. Its tokenizer has the digits, `*`, `=`, and one token each for the
start and the end of a tool call, so a call is ten tokens. The task is `37*42=`: call the calculator, then repeat its
answer. The teacher of stage 1 calls it with a wrong digit more often than not. You do not need this file with your own
model and data.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
BEGIN, END_OF_CALL = '{"name":"evaluate","arguments":{"expression":"', '"}}'
END, PAD = "<end>", "<pad>"
TEACHER_ERROR_RATE = 0.6
HELD_OUT_EVERY = 10


def make_tokenizer() -> Any:
    """Return a tokenizer of characters, with the marks of a call as tokens."""
    vocabulary = {token: i for i, token in enumerate([PAD, END, *"0123456789*="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in (BEGIN, END_OF_CALL)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, unk_token=PAD)


def make_model(folder: Path, seed: int) -> None:
    """Write a model with random weights and its tokenizer."""
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.05,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # containers must be able to read it, too


def teach(a: int, b: int, dice: random.Random) -> str:
    """Return the teacher's expression, often with one digit replaced by another."""
    text = f"{a}*{b}"
    if dice.random() < TEACHER_ERROR_RATE:
        place = dice.choice([i for i, c in enumerate(text) if c.isdigit()])
        text = text[:place] + dice.choice([d for d in "123456789" if d != text[place]]) + text[place + 1 :]
    return text


def write_data(folder: Path, seed: int) -> None:
    """Write the teacher's turns, and the problems for training and validation."""
    folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(seed)
    problems = [(a, b) for a in range(11, 100) for b in range(11, 100)]
    dice.shuffle(problems)
    turns, train, held_out = [], [], []
    for number, (a, b) in enumerate(problems):
        row = {"prompt": f"{a}*{b}=", "answer": str(a * b)}
        if number % HELD_OUT_EVERY == 0:
            held_out.append(row)
            continue
        train.append(row)
        expression = teach(a, b, dice)
        call = f"{BEGIN}{expression}{END_OF_CALL}"
        result = str(eval(expression))  # made above: two numbers and a sign
        turns.append({"prompt": row["prompt"], "completion": call})
        turns.append({"prompt": f"{row['prompt']}{call}{END}{result}", "completion": result})
    for name, rows in (("turns", turns), ("train", train), ("validation", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write_data(HERE / "data", 0)
    make_model(HERE / "model", 0)
    print(f"{HERE}: model/ and data/ exist; next: paceline up sft.yaml")

"""The demo's task: `07+45=` → `250`, the sum's digits, least significant first.

Least significant first, since a left-to-right model then needs one carry at a time. Problems are held out by a hash
of the prompt, so no training answer ever shows a held-out one.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

DIGITS = "0123456789"
HELD_OUT_OF_TEN = 1
TEACHER_ERROR_RATE = 0.5


def answer(a: int, b: int) -> str:
    """Return the right completion of `problem(a, b)`: three digits, least significant first."""
    return f"{a + b:03d}"[::-1]


def problem(a: int, b: int) -> str:
    """Return the prompt: two numbers below 100 with two digits each."""
    return f"{a:02d}+{b:02d}="


def is_held_out(prompt: str) -> bool:
    """Return whether a problem belongs to the validation set."""
    return hashlib.sha256(prompt.encode()).digest()[0] % 10 < HELD_OUT_OF_TEN


def teach(right: str, dice: random.Random) -> str:
    """Return the teacher's answer: in half of the cases one digit is replaced by another."""
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
    with (
        (directory / "train.jsonl").open("w") as train,
        (directory / "validation.jsonl").open("w") as held_out,
    ):
        for a, b in pairs:
            row = {"prompt": problem(a, b), "completion": teach(answer(a, b), dice), "answer": answer(a, b)}
            (held_out if is_held_out(row["prompt"]) else train).write(json.dumps(row) + "\n")

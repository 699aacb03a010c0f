"""Writes the small data sets of this folder's recipes: `python make_data.py [FOLDER]`. They show the columns and let
every recipe run; train a useful model on your own data set.

Each question has a right answer in one sentence and a wrong one, so a few steps already raise the accuracy on held-out
pairs.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

NUM_TRAIN, NUM_VALIDATION = 160, 32
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
UNITS = (
    ("hours", "minutes", 60),
    ("metres", "centimetres", 100),
    ("days", "hours", 24),
    ("dozens", "pieces", 12),
)
WORDS = (
    "river",
    "lantern",
    "copper",
    "window",
    "garden",
    "mountain",
    "pencil",
    "winter",
    "harbour",
    "meadow",
)


class Question(NamedTuple):
    """A question with two answers."""

    text: str
    right: str
    wrong: str


def questions(seed: int = 0) -> Iterator[Question]:
    """Yield endless questions, all different."""
    draw, asked = random.Random(seed), set[str]()
    while True:
        question = draw.choice((sums, units, days, letters))(draw)
        if question.text not in asked:
            asked.add(question.text)
            yield question


def sums(draw: random.Random) -> Question:
    """Return a sum of two numbers."""
    a, b = draw.randint(2, 60), draw.randint(2, 40)
    return Question(
        f"What is {a} + {b}?",
        f"{a} + {b} is {a + b}.",
        f"{a} + {b} is {a + b + draw.choice((-10, -1, 1, 10))}.",
    )


def units(draw: random.Random) -> Question:
    """Return a conversion of units."""
    large, small, factor = draw.choice(UNITS)
    number = draw.randint(2, 20)
    question = f"How many {small} are {number} {large}?"
    return Question(
        question,
        f"{number} {large} are {number * factor} {small}.",
        f"{number} {large} are {number + factor} {small}.",
    )


def days(draw: random.Random) -> Question:
    """Return a question about a day of the week."""
    start, later = draw.randrange(7), draw.randint(2, 12)
    question = f"Today is {DAYS[start]}. Which day is it in {later} days?"
    right, wrong = DAYS[(start + later) % 7], DAYS[(start + later + draw.randint(1, 6)) % 7]
    return Question(question, f"In {later} days it is {right}.", f"In {later} days it is {wrong}.")


def letters(draw: random.Random) -> Question:
    """Return a question about a letter of a word."""
    word = draw.choice(WORDS)
    place = draw.randint(1, len(word))
    wrong = draw.choice(sorted(set("abcdefghijklmnopqrstuvwxyz") - {word[place - 1]}))
    ordinal = f"letter number {place} of the word '{word}'"
    return Question(f"What is {ordinal}?", f"It is '{word[place - 1]}'.", f"It is '{wrong}'.")


def files() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each file by its name."""
    source = questions()
    train = [next(source) for _ in range(NUM_TRAIN)]
    validation = [next(source) for _ in range(NUM_VALIDATION)]
    labelled = [
        (q, good) for number, q in enumerate(train) for good in ((True, False) if number % 2 else (False, True))
    ]
    return {
        "conversations.jsonl": [{"messages": [*asked(q), *answered(q.right)]} for q in train],
        "train.jsonl": [pair(q) for q in train],
        "validation.jsonl": [pair(q) for q in validation],
        "labelled.jsonl": [
            {"prompt": asked(q), "completion": answered(q.right if good else q.wrong), "label": good}
            for q, good in labelled
        ],
        "prompts.jsonl": [{"prompt": asked(q)} for q in train],
    }


def pair(question: Question) -> dict[str, Any]:
    """Return a row of preferences."""
    chosen, rejected = answered(question.right), answered(question.wrong)
    return {"prompt": asked(question), "chosen": chosen, "rejected": rejected}


def asked(question: Question) -> list[dict[str, str]]:
    """Return the question as a chat."""
    return [{"role": "user", "content": question.text}]


def answered(text: str) -> list[dict[str, str]]:
    """Return an answer as the messages that follow the question."""
    return [{"role": "assistant", "content": text}]


def main() -> None:
    """Write all files."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, rows in files().items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()

"""Makes the data of the two tasks beside this file that need no data set: ./data/words and ./data/calculator.

python prepare.py [--seed 0]

Words: questions whose numbers are words, of five kinds (column `kind`). One in five problems is held out, by its
numbers. sft.jsonl has right answers; train.jsonl and held_out.jsonl have the answers for the reward.
Calculator: products of two numbers from 11 to 99. The conversations call a tool.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
NAMES = ["Anna", "Tom", "Mia", "Ben", "Lena", "Max", "Emma", "Paul"]
THINGS = ["apples", "eggs", "books", "coins", "cards", "shells", "stamps", "pens"]
KINDS = {
    "one-digit sums": (range(2, 10), range(2, 10), "What is {a} plus {b}?"),
    "two-digit sums": (range(10, 100), range(10, 100), "What is {a} plus {b}?"),
    "one-digit products": (range(2, 10), range(2, 10), "What is {a} times {b}?"),
    "sums in a story": (range(10, 100), range(2, 10), "{name} has {a} {things} and gets {b} more. How many now?"),
    "products in a story": (range(2, 10), range(2, 10), "{name} has {a} boxes of {b} {things}. How many {things}?"),
}
"""Maps a kind to its first and second numbers and its question."""
HELD_OUT_EVERY = 5
PROBLEMS = {"sft": 400, "train": 2000, "held_out": 60}
"""Rows of each kind. Kinds with fewer problems repeat them, in other words or in the same."""
CALL = '{{"name": "evaluate", "arguments": {{"expression": "{a}*{b}"}}}}'


def main() -> None:
    """Write both tasks' data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=HERE / "data")
    options = parser.parse_args()
    write_words(options.folder / "words", random.Random(options.seed))
    write_calculator(options.folder / "calculator", random.Random(options.seed))


def in_words(number: int) -> str:
    """Return a number from 0 to 99 as a word."""
    if number < len(ONES):
        return ONES[number]
    tens, ones = divmod(number, 10)
    return TENS[tens - 2] + (f"-{ONES[ones]}" if ones else "")


def write_words(folder: Path, dice: random.Random) -> None:
    """Write the three files of questions in words, their kinds in turn."""
    rows: dict[str, list[list[dict[str, str]]]] = {name: [] for name in PROBLEMS}
    for kind, (first, second, question) in KINDS.items():
        problems = [(a, b) for a in first for b in second]
        dice.shuffle(problems)
        size = max(1, len(problems) // HELD_OUT_EVERY)
        parts = {"sft": problems[size:], "train": problems[size:], "held_out": problems[:size]}
        for name, count in PROBLEMS.items():
            drawn = dice.sample(parts[name], min(count, len(parts[name])))
            rows[name].append([ask(kind, question, *drawn[n % len(drawn)], dice) for n in range(count)])
    for name, kinds in rows.items():
        write(folder / f"{name}.jsonl", (row for turn in zip(*kinds, strict=True) for row in turn))


def ask(kind: str, question: str, a: int, b: int, dice: random.Random) -> dict[str, str]:
    """Return a row with a problem in words and its answer in digits."""
    answer = str(a * b if "product" in kind else a + b)
    text = question.format(a=in_words(a), b=in_words(b), name=dice.choice(NAMES), things=dice.choice(THINGS))
    return {"prompt": text, "completion": answer, "answer": answer, "kind": kind}


def write_calculator(folder: Path, dice: random.Random) -> None:
    """Write conversations with a call of the tool, and the problems for training and validation."""
    problems = [(a, b) for a in range(11, 100) for b in range(11, 100)]
    dice.shuffle(problems)
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {a} times {b}?"}], "answer": str(a * b)} for a, b in problems
    ]
    write(folder / "held_out.jsonl", rows[:200])
    write(folder / "train.jsonl", rows[200:2200])
    write(folder / "sft.jsonl", (conversation(a, b) for a, b in problems[2200:2700]))


def conversation(a: int, b: int) -> dict[str, Any]:
    """Return a question, the call of the tool, its result and the answer."""
    return {
        "messages": [
            {"role": "user", "content": f"What is {a} times {b}?"},
            {"role": "assistant", "content": CALL.format(a=a, b=b)},
            {"role": "tool", "content": str(a * b)},
            {"role": "assistant", "content": str(a * b)},
        ]
    }


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as lines of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()

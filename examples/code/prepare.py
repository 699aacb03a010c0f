"""Makes the inputs of the two specs beside this file: ./model, ./data/train.jsonl and ./data/validation.jsonl.

python prepare.py [--seed 0]

The model is a two-layer Qwen3 with random weights and a tokenizer of characters. A problem is the head of a Python
function with a comment that describes it, in the form of HumanEval: `def f(x):  # plus 3, times 4` goes on with
`(x+3)*4`. Each row has the prompt, the completion of a teacher that errs in half of the cases (for sft.yaml), and tests
(for grpo.yaml). One problem in ten is held out.
"""

import argparse
import hashlib
import json
import random
from pathlib import Path

from paceline.services.demo.task import make_model

HERE = Path(__file__).resolve().parent
SIGNS = {"plus": "+", "minus": "-", "times": "*"}
DIGITS = "123456789"
INPUTS = (0, 2, 5)
TEACHER_ERROR_RATE = 0.5


def prompt_of(first: tuple[str, str], second: tuple[str, str]) -> str:
    """Return the head of the function."""
    return f"def f(x):  # {' '.join(first)}, {' '.join(second)}\n    return "


def body_of(first: tuple[str, str], second: tuple[str, str]) -> str:
    """Return the right completion."""
    return f"(x{SIGNS[first[0]]}{first[1]}){SIGNS[second[0]]}{second[1]}"


def tests_of(first: tuple[str, str], second: tuple[str, str]) -> str:
    """Return tests in HumanEval's form."""
    lines = ["def check(candidate):"]
    for x in INPUTS:
        right = eval(body_of(first, second), {"x": x})
        lines.append(f"    assert candidate({x}) == {right}")
    return "\n".join(lines) + "\n"


def teach(body: str, dice: random.Random) -> str:
    """Return the teacher's completion; in half of the cases one sign or digit is replaced by another."""
    if dice.random() >= TEACHER_ERROR_RATE:
        return body
    place = dice.choice([index for index, c in enumerate(body) if c in "+-*" or c in DIGITS])
    kind = DIGITS if body[place] in DIGITS else "+-*"
    wrong = dice.choice([c for c in kind if c != body[place]])
    return body[:place] + wrong + body[place + 1 :]


def is_held_out(prompt: str) -> bool:
    """Return whether a problem belongs to the validation set."""
    return hashlib.sha256(prompt.encode()).digest()[0] % 10 == 0


def write_data(directory: Path, seed: int) -> None:
    """Write both files. The teacher answers each problem of the training set eight times."""
    directory.mkdir(parents=True, exist_ok=True)
    dice = random.Random(seed)
    steps = [(word, digit) for word in SIGNS for digit in DIGITS]
    problems = [(first, second) for first in steps for second in steps]
    dice.shuffle(problems)
    with (directory / "train.jsonl").open("w") as train, (directory / "validation.jsonl").open("w") as other:
        for repeat in range(8):
            for first, second in problems:
                prompt = prompt_of(first, second)
                row = {"prompt": prompt, "completion": teach(body_of(first, second), dice)}
                row |= {"tests": tests_of(first, second), "entry_point": "f"}
                held_out = is_held_out(prompt)
                if not (held_out and repeat):
                    (other if held_out else train).write(json.dumps(row) + "\n")


def main() -> None:
    """Make model and data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    write_data(HERE / "data", seed)
    problem = prompt_of(("plus", "1"), ("times", "1")) + prompt_of(("minus", "1"), ("times", "1"))
    characters = "".join(sorted({*problem, *DIGITS, *"+-*()"}))
    make_model(HERE / "model", seed=seed, characters=characters)
    print(f"{HERE}: model/ and data/ exist; next: paceline up sft.yaml")


if __name__ == "__main__":
    main()

"""The run of `make campaign NAME=chaos ARGS="--environments"`: episodes of 20 turns, and how many of them a kill cost.

The environment writes every turn that reaches it into a file of its process, so what was sampled again shows in a record that
no service of Paceline keeps: an episode that was cut off has a successor, which begins with the same turns.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "support" / "models"))  # pytest has it by its settings

from tiny_chat import save_tiny_chat

from paceline.spec import RunSpec
from paceline.spec.reading import parse_spec

TURNS, GROUP_SIZE = 20, 4
SIZES = {"rollout": 2, "reward": 1, "environment": 2, "learner": 1, "coordinator": 1}
"""Services of such a campaign."""

ROLES, KINDS = ("rollout", "environment"), ("kill",)
"""What is met unless something else is asked for."""

STEPS = 10
GAME = f"""
import itertools
import json
import os
import pathlib

numbers = itertools.count()

class Game:
    deterministic = True

    def reset(self, row, **_):
        self.file = FOLDER / f"{{os.getpid()}}-{{next(numbers)}}.jsonl"
        self.turns, self.letters = 0, 0
        self.note(row=row)

    def note(self, **line):
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\\n")

    def step(self, text):
        self.turns += 1
        self.letters += sum(map(str.isalpha, text))
        self.note(text=text)
        return f"{{self.turns}}", None, self.turns == {TURNS}

    def get_reward(self):
        return self.letters / 10
"""


def make_spec(directory: Path, steps: int) -> RunSpec:
    """A model of a few thousand weights that plays a game of 20 turns; a checkpoint every five steps."""
    (directory / "turns").mkdir(parents=True, exist_ok=True)
    save_tiny_chat(directory / "model")
    rows = [{"prompt": [{"role": "user", "content": f"go {row}"}], "row": row} for row in range(2000)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "game.py").write_text(GAME + f"\nFOLDER = pathlib.Path({str(directory / 'turns')!r})\n")
    return parse_spec(
        {
            "name": "chaos",
            "policy": {
                "model_name": str(directory / "model"),
                "max_total_sequence_length": 1024,
                "optimizer": {"lr": 1e-3},
                "generation": {"max_new_tokens": 6},
            },
            "data": {"train": "train.jsonl"},
            "environment": {"class": "game.py:Game", "max_turns": TURNS + 1, "processes": 1},
            "grpo": {
                "num_prompts_per_step": 4,
                "num_generations_per_prompt": GROUP_SIZE,
                "max_num_steps": steps,
            },
            "async_grpo": {"max_trajectory_age_steps": 4, "late_wait_s": 5.0},
            "weights": {"max_wait_s": 10.0},
            "checkpointing": {"save_period": 5},
            "logger": {"tensorboard": False},
        },
        base=directory,
    )


class Played(NamedTuple):
    """One instance of the environment: the turns that reached it."""

    pid: int
    row: int
    texts: tuple[str, ...]


def played(directory: Path) -> list[Played]:
    """Every instance so far. A line that a kill has cut off is no turn."""
    found = []
    for path in sorted((directory / "turns").glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if lines:
            texts = tuple(line["text"] for line in lines[1:])
            found.append(Played(int(path.name.split("-")[0]), lines[0]["row"], texts))
    return found


def lost_turns(instances: list[Played]) -> list[int]:
    """Turns of each episode that was cut off that its successor did not begin with: those were sampled again.

    An episode of which no other instance of its row has the first turn has no successor: its group was dropped with its run,
    or it was cut off in its first turn, which is one lost turn where the row went on.
    """
    rows: dict[int, list[Played]] = defaultdict(list)
    for instance in instances:
        rows[instance.row].append(instance)
    lost = []
    for same in rows.values():
        finished = sum(len(each.texts) == TURNS for each in same)
        for cut in (each for each in same if 0 < len(each.texts) < TURNS):
            others = [each for each in same if each is not cut and each.pid != cut.pid]
            common = max((_common(cut.texts, each.texts) for each in others), default=0)
            if common or finished >= GROUP_SIZE:
                lost.append(len(cut.texts) - common)
    return lost


def _common(first: tuple[str, ...], second: tuple[str, ...]) -> int:
    number = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        number += 1
    return number


def broken_turns(run_folder: Path) -> int:
    """Most turns whose answer broke off that the environment workers of a run have reported at one time."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return int(max((line.get("environment_workers/broken_turns") or 0 for line in lines), default=0))

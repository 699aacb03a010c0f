"""How many steps an hour asynchrony gains when lengths have a long tail: a simulation of the devices, with real services.

    python benchmarks/long_tail.py [--steps 40] [--age 4] [--json]

Simulated are the engine's decoding (20 ms a step whatever its batch, as on a GPU that reads all weights once a step) and the
learner's arithmetic (seconds by tokens). Lengths are log-normal with a median of 20 tokens, the longest 400, 20 times the
median. Coordinator, ledger, workers, scoring, batches, weights and the learner's loop are the real ones.

Asynchronous (max_trajectory_age_steps = 4): half the devices decode, the other half trains 2,000 tokens a second.
Synchronous (0): all devices decode, then all train, 4,000 tokens a second. Its decoding is not faster: more engines make
smaller batches, and a decode step costs what it costs. So the comparison favours the synchronous side where it can.
Results: docs/operate/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from end_to_end.reward import share_of_small_digits
from long_tail import service
from long_tail.engine import DECODE_STEP_S, LONGEST, MEDIAN_TOKENS
from long_tail.trainer import VARIABLE
from short_form import parse

from paceline.client import Client, state_name
from paceline.services.demo.task import make_model, write_data
from paceline.services.local.cluster import LocalCluster
from paceline.spec import RunSpec
from paceline.spec.reading import parse_spec

PROMPTS, COMPLETIONS = 16, 8
TOKENS_PER_S = 2000.0
"""Tokens that half the devices train in a second: a step of 128 completions takes about 2.5 s, the longest completion 8 s."""
WARM_UP_STEPS = 6


@dataclass(frozen=True)
class Side:
    """One of the two runs."""

    name: str
    age: int
    """η."""
    tokens_per_s: float
    """Tokens that the learner trains in a second."""
    steps: int
    """Steps that are measured, after the warm-up."""
    warm_up: int
    """Steps before them."""


def main() -> None:
    """Run both sides, one after the other, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="steps of the asynchronous run that are measured")
    parser.add_argument("--age", type=int, default=4, help="max_trajectory_age_steps of the asynchronous run")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parse(parser, steps=1, age=1)
    warm_up = 1 if options.short else WARM_UP_STEPS
    sides = (
        Side("asynchronous", options.age, TOKENS_PER_S, options.steps, warm_up),
        Side("synchronous", 0, 2 * TOKENS_PER_S, max(options.steps // 3, 1), warm_up),
    )
    with tempfile.TemporaryDirectory(prefix="paceline-benchmark-") as name:
        directory = Path(name)
        make_model(directory / "model", seed=0)
        write_data(directory / "task", seed=0)
        results = {side.name: measure(directory, side) for side in sides}
    ours, turns = results["asynchronous"], results["synchronous"]
    result = {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "load_average": os.getloadavg()[0],
        "async_over_sync": round(ours["tokens_per_s"] / turns["tokens_per_s"], 2),
        "learner_wait_share": ours["wait_share"],
        **results,
    }
    if options.json:
        json.dump(result, sys.stdout, indent=2)
        print()
        return
    print(result["machine"])
    for side, figures in results.items():
        print(f"{side:13}" + "  ".join(f"{name} {value}" for name, value in figures.items()))
    print(f"async_over_sync {result['async_over_sync']}, learner_wait_share {result['learner_wait_share']}")


def make_spec(directory: Path, side: Side) -> RunSpec:
    """Return the run of a side: two rollout workers, whose engines hold every sequence that the exchange leases."""
    longest = LONGEST * MEDIAN_TOKENS
    return parse_spec(
        {
            "name": side.name,
            "policy": {
                "model_name": str(directory / "model"),
                "max_total_sequence_length": longest + 16,
                "generation": {"max_new_tokens": longest, "max_batch_size": 1024},
            },
            "data": {"train": str(directory / "task" / "train.jsonl")},
            "rewards": [{"function": f"{REWARD_FILE}:{share_of_small_digits.__name__}"}],
            "grpo": {
                "num_prompts_per_step": PROMPTS,
                "num_generations_per_prompt": COMPLETIONS,
                # The last steps, for which nothing more is generated ahead, are not measured.
                "max_num_steps": side.warm_up + side.steps + side.age,
            },
            "async_grpo": {"max_trajectory_age_steps": side.age},
            "checkpointing": {"enabled": False},
            "cluster": {"rollout_workers": 2, "reward_workers": 1, "learner_ranks": 1},
        }
    )


REWARD_FILE = Path(share_of_small_digits.__code__.co_filename)


def measure(directory: Path, side: Side) -> dict[str, Any]:
    """Run a side; return its figures over the steps after the warm-up."""
    spec = make_spec(directory, side)
    launcher = [sys.executable, str(Path(service.__file__))]
    os.environ[VARIABLE] = str(side.tokens_per_s)
    cluster = LocalCluster(directory / side.name, spec.cluster, launchers={"rollout": launcher, "learner": launcher})
    with cluster, Client(cluster.address) as client:
        run = client.wait(client.submit(spec).run_id)
        if state_name(run) != "succeeded":
            raise SystemExit(f"the run {state_name(run)}: {run.message}; see {cluster.directory}/logs")
        lines = (cluster.directory / run.run_id / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    records = records[side.warm_up - 1 : side.warm_up + side.steps]
    steps, seconds = records[1:], records[-1]["time"] - records[0]["time"]
    tokens = sum(record["trained_tokens"] for record in steps)

    def share(name: str) -> float:
        return round(sum(record.get(name) or 0.0 for record in steps) / seconds, 4)

    return {
        "steps": len(steps),
        "step_s": round(seconds / len(steps), 3),
        "tokens_per_s": round(tokens / seconds, 1),
        "mean_length": round(tokens / len(steps) / PROMPTS / COMPLETIONS, 1),
        "longest_s": round(LONGEST * MEDIAN_TOKENS * DECODE_STEP_S, 1),
        "wait_share": share("learner_wait_s"),
        "train_share": share("step_s"),
        "mean_age_steps": round(sum(record["age"] for record in steps) / len(steps), 2),
    }


if __name__ == "__main__":
    main()

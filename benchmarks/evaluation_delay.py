"""How much evaluations inside a run delay its learner: two runs side by side, one of which evaluates.

    python benchmarks/evaluation_delay.py [--pairs 3] [--workers 2] [--room 1.5] [--longest 200] [--native]

Engines and the learner cost time by the clock, as in benchmarks/long_tail.py, so the processor's speed does not matter and both
runs of a pair have a GPU's kind of time at once. Coordinator, ledger, workers, scoring, batches, weights and the learner's loop are
the real ones. The learner takes about 1.2 s a step. The engines' places for sequences are `--room` times what that needs, so
generation has a reserve, as a run has whose learner never waits.

Each evaluation has as many completions as two steps, every ten steps: a fifth more tokens to generate. `delay` is the learner's
extra time for the same steps, from the first evaluation's beginning until ten steps after the last one's: seconds with
evaluations by seconds without, minus 1, the median over pairs. `versions` counts the versions of an evaluation's tokens.

With `--native` a tiny model is really sampled and trained on this machine's cores, the runs of a pair one after the other. There
evaluations also take cores that the learner would use, so on one machine the delay contains their share of the arithmetic.
Prints one JSON object. Results: docs/operate/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from end_to_end.reward import share_of_small_digits
from long_tail import service
from long_tail.trainer import VARIABLE
from short_form import parse

from paceline.client import Client, state_name
from paceline.services.demo.task import make_model, write_data
from paceline.services.local.cluster import LocalCluster
from paceline.spec import RunSpec
from paceline.spec.reading import parse_spec

PROMPTS, COMPLETIONS = 16, 8
LONGEST = 200
"""Tokens of the longest completion: 4 s by the clock, more than three steps."""
NEEDED = 80
"""Sequences that have to be under way for a batch in the time of a step: 128 completions of some 37 tokens at 20 ms each, in
1.2 s."""
TOKENS_PER_S = 4000.0
PERIOD, EVALUATED = 10, 64
"""Steps between evaluations, and prompts of each with 4 completions: those of two steps."""
AGE = 4
REWARD_FILE = Path(share_of_small_digits.__code__.co_filename)


def main() -> None:
    """Run the pairs and print, or run one side of a pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--evaluations", type=int, default=3, help="evaluations that are measured in a run")
    parser.add_argument("--workers", type=int, default=2, help="rollout workers")
    parser.add_argument("--room", type=float, default=1.5, help="places in engines by what is needed")
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of the longest completion, 20 ms each")
    parser.add_argument("--native", action="store_true", help="real arithmetic in place of the clock")
    parser.add_argument("--side", choices=["with", "without"], help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parse(parser, pairs=1, evaluations=1, workers=1, longest=20)
    if options.side:
        print(json.dumps(measure(options)))
        return
    pairs = [run_pair(options, number) for number in range(options.pairs)]
    delays = [pair["with"]["seconds"] / pair["without"]["seconds"] - 1 for pair in pairs]
    result = {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "load_average": os.getloadavg()[0],
        "workers": options.workers,
        "room": options.room,
        "longest": options.longest,
        "engine": "native" if options.native else "timed",
        "pairs": pairs,
        "delays": [round(delay, 4) for delay in delays],
        "delay": round(statistics.median(delays), 4),
        "learner_wait_share": {
            side: statistics.median(pair[side]["wait_share"] for pair in pairs) for side in ("without", "with")
        },
        "versions": max(pair["with"]["versions"] for pair in pairs),
    }
    print(json.dumps(result))


def run_pair(options: argparse.Namespace, number: int) -> dict[str, Any]:
    """Run both sides, each in a process: at the same time, or with real arithmetic one after the other in alternating order."""
    sides = ["with", "without"] if number % 2 else ["without", "with"]
    with tempfile.TemporaryDirectory(prefix="paceline-benchmark-") as name:
        make_model(Path(name) / "model", seed=0)
        write_data(Path(name) / "task", seed=0)
        command = [sys.executable, __file__, *sys.argv[1:], "--directory", name, "--side"]
        running, found = [], {}
        for side in sides:
            process = subprocess.Popen([*command, side], stdout=subprocess.PIPE, text=True)
            running.append((side, process))
            if options.native:
                process.wait()
        for side, process in running:
            out, _ = process.communicate()
            if process.returncode:
                raise SystemExit(f"the run {side} evaluations has failed")
            found[side] = json.loads(out.splitlines()[-1])
    return found


def make_spec(options: argparse.Namespace) -> RunSpec:
    """Return the run of a side."""
    evaluates = options.side == "with"
    directory: Path = options.directory
    return parse_spec(
        {
            "name": f"{options.side}-evaluations",
            "policy": {
                "model_name": str(directory / "model"),
                "max_total_sequence_length": options.longest + 16,
                "generation": {
                    "max_new_tokens": 16 if options.native else options.longest,
                    "max_batch_size": round(NEEDED * options.room / options.workers),
                },
            },
            "data": {
                "train": str(directory / "task" / "train.jsonl"),
                **({"validation": str(directory / "task" / "validation.jsonl")} if evaluates else {}),
            },
            "rewards": [{"function": f"{REWARD_FILE}:{share_of_small_digits.__name__}"}],
            "grpo": {
                "num_prompts_per_step": PROMPTS,
                "num_generations_per_prompt": COMPLETIONS,
                # The last steps, for which nothing more is generated ahead, are not measured.
                "max_num_steps": last_step(options) + 1 + AGE,
                **({"val_period": PERIOD, "max_val_samples": EVALUATED} if evaluates else {}),
                "val_samples_per_prompt": 4,
            },
            "async_grpo": {"max_trajectory_age_steps": AGE},
            "checkpointing": {"enabled": False},
            "cluster": {"rollout_workers": options.workers, "reward_workers": 1, "learner_ranks": 1},
        }
    )


def last_step(options: argparse.Namespace) -> int:
    """Return the step after which nothing more is measured: a period after that of the last measured evaluation."""
    return int(PERIOD * (options.evaluations + 1) - 1)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run a side; return its figures from the step that begins the first evaluation to `last_step`."""
    spec = make_spec(options)
    launcher = [sys.executable, str(Path(service.__file__))]
    launchers = {} if options.native else {"rollout": launcher, "learner": launcher}
    os.environ[VARIABLE] = str(TOKENS_PER_S)
    cluster = LocalCluster(options.directory / options.side, spec.cluster, launchers=launchers)
    with cluster, Client(cluster.address) as client:
        run = client.wait(client.submit(spec).run_id)
        if state_name(run) != "succeeded":
            raise SystemExit(f"the run {state_name(run)}: {run.message}; see {cluster.directory}/logs")
        lines = (cluster.directory / run.run_id / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        versions = [
            each
            for record in records
            if record["kind"] == "eval"
            for each in client.samples(run.run_id, evaluated_version=int(record["step"]))["versions"]
        ]
    found = figures(records, last_step(options))
    return found | {"versions": max((len(each) for each in versions), default=0)}


def figures(records: Sequence[Mapping[str, Any]], last: int) -> dict[str, Any]:
    """Return the figures of a run's lines of metrics, over the steps from PERIOD to `last`."""
    ended_s = {each["step"]: each["time"] for each in records if each["kind"] == "train"}
    trained = [each for each in records if each["kind"] == "train" and PERIOD <= each["step"] <= last]
    seconds = ended_s[last] - ended_s[PERIOD - 1]
    return {
        "steps": len(trained),
        "seconds": round(seconds, 2),
        "step_s": round(seconds / len(trained), 3),
        "wait_share": round(sum(each["learner_wait_s"] for each in trained) / seconds, 4),
        "trained_tokens": sum(each["trained_tokens"] for each in trained),
        "evaluation_s": [
            round(each["time"] - ended_s[each["requested_step"] - 1], 2)
            for each in records
            if each["kind"] == "eval" and each["requested_step"] <= last
        ],
    }


if __name__ == "__main__":
    main()

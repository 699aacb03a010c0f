"""Resident memory of every service over a long run: it must not grow with the number of groups.

    python benchmarks/memory.py [--groups 10000] [--every 2000] [--json]

A random Qwen3 of hidden size 32 and one layer, 32 groups of 2 completions a step, at most 8 new tokens, weights published
after every step and checkpoints every 10: all services as processes of their own. Printed for each role, its child
processes included: MB after every `--every` trained groups, and the growth from the first of these moments to the last.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import psutil
from short_form import parse

from paceline.client import Client, state_name
from paceline.services.demo.task import make_model, write_data
from paceline.services.local.cluster import LocalCluster
from paceline.spec import RunSpec
from paceline.spec.reading import parse_spec

ROLES = ("coordinator", "rollout", "reward", "learner")
GROUPS_PER_STEP = 32


def measure(folder: Path, groups: int, every: int) -> dict[int, dict[str, float]]:
    """MB of each role, by the number of groups that were trained."""
    spec = make_spec(folder, groups)
    moments = {trained // GROUPS_PER_STEP: trained for trained in range(every, groups + 1, every)}
    found: dict[int, dict[str, float]] = {}
    with LocalCluster(folder / "runs", spec.cluster) as cluster, Client(cluster.address) as client:
        run = client.submit(spec)
        for event in client.watch(run.run_id):
            if event.kind == "step" and (trained := moments.get(event.content["step"] + 1)):
                found[trained] = {role: rss_mb(cluster, role) for role in ROLES}
        ended = client.get(run.run_id)
        if state_name(ended) != "succeeded":
            raise SystemExit(f"the run {state_name(ended)}: {ended.message}; see {cluster.directory}/logs")
    return found


def rss_mb(cluster: LocalCluster, role: str) -> float:
    """Resident memory of a role's processes and their children."""
    parents = [psutil.Process(pid) for pid in cluster.pids(role).values()]
    family = [process for parent in parents for process in (parent, *parent.children(recursive=True))]
    return sum(process.memory_info().rss for process in family) / 1e6


def make_spec(folder: Path, groups: int) -> RunSpec:
    """A run of that many groups, and two steps more so that it has not ended when the last one is counted."""
    make_model(folder / "model", seed=0, hidden=32, layers=1)
    write_data(folder / "task", 0)
    return parse_spec(
        {
            "policy": {
                "model_name": str(folder / "model"),
                "max_total_sequence_length": 32,
                "generation": {"max_new_tokens": 8, "max_batch_size": 64},
            },
            "data": {"train": str(folder / "task" / "train.jsonl")},
            "rewards": [{"function": "exact_match"}],
            "grpo": {
                "num_prompts_per_step": GROUPS_PER_STEP,
                "num_generations_per_prompt": 2,
                "max_num_steps": groups // GROUPS_PER_STEP + 2,
            },
            "checkpointing": {"save_period": 10},
            "logger": {"tensorboard": False, "keep_samples": False},
            "cluster": {"rollout_workers": 1, "reward_workers": 1, "learner_ranks": 1},
        }
    )


def main() -> None:
    """Parses, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=2_000, help="groups between two measurements")
    parser.add_argument("--json", action="store_true")
    arguments = parse(parser, groups=128, every=64)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), arguments.groups, arguments.every)
    first, last = found[min(found)], found[max(found)]
    growth = {role: last[role] - first[role] for role in ROLES}
    if arguments.json:
        print(json.dumps({"mb_after_groups": found, "growth_mb": growth}))
        return
    print(f"{'MB after':>12}" + "".join(f"{trained:>10,}" for trained in found) + f"{'growth':>10}")
    for role in ROLES:
        values = "".join(f"{at[role]:10.1f}" for at in found.values())
        print(f"{role:>12}{values}{growth[role]:10.1f}")


if __name__ == "__main__":
    main()

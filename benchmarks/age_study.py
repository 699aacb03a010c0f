"""Does asynchrony cost learning? The demo's task at several ages, with and without a correction, over several seeds.

    python benchmarks/age_study.py --out age.jsonl [--seeds 0,1,2,3,4] [--arms age-0,age-4] [--services] [--plot age.svg] [--json]

Every arm is the demo's GRPO stage as it is (services/demo/grpo.yaml: 120 steps of 64 prompts × 8, one update a step, lr
7e-4), from a model that imitated the teacher until 45 % of its answers were right. Only the age and the correction differ.
The age is exact: one process samples with the weights of exactly k steps ago (objective_runs/policy.py). `--services` instead submits to real services with max_trajectory_age_steps = k, where
ages vary up to k and the wall time means something. One line of JSON is added for each run that ended, and what is
there already is not run again: the study can be interrupted, and processes with seeds of their own can share it.
Recorded results: docs/use/objectives.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from objective_runs.curves import Style, write_curves
from objective_runs.policy import imitate_until, train
from short_form import parse

from paceline.client import Client
from paceline.services.demo.run import make_files
from paceline.services.local.cluster import LocalCluster
from paceline.spec.reading import load_spec

STARTS_AT = 0.45
HELD_OUT = 1000
SERVICES_TIMEOUT_S = 1800.0


class Arm(NamedTuple):
    """Settings of one line of the table."""

    age: int
    settings: tuple[str, ...] = ()


NO_WEIGHT = "loss_fn.truncated_importance_sampling_ratio=null"
BEHAVIOUR = ("loss_fn.ratio_anchor=behaviour", NO_WEIGHT)

ARMS = {
    "age-0": Arm(0),
    "age-4": Arm(4),
    "age-4-uncorrected": Arm(4, (NO_WEIGHT,)),
    "age-8": Arm(8),
    "age-8-uncorrected": Arm(8, (NO_WEIGHT,)),
    # Other candidates for the default: the same sampler, other corrections.
    "age-8-icepop": Arm(
        8,
        (
            "loss_fn.truncated_importance_sampling_type=icepop",
            "loss_fn.truncated_importance_sampling_ratio=5",
            "loss_fn.truncated_importance_sampling_ratio_min=0.5",
        ),
    ),
    "age-8-ppo-clip-at-sampler": Arm(8, BEHAVIOUR),
    "age-8-dppo": Arm(8, (*BEHAVIOUR, "loss_fn.policy_loss=dppo")),
    "age-8-m2po": Arm(8, (*BEHAVIOUR, "loss_fn.policy_loss=unclipped", "loss_fn.m2_threshold=0.04")),
    "age-8-sequence-truncation": Arm(8, ("loss_fn.truncated_importance_sampling_type=sequence_tis",)),
    "age-8-truncation-5": Arm(8, ("loss_fn.truncated_importance_sampling_ratio=5",)),
    "age-16": Arm(16),
}

SHORT = ("grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4", "grpo.max_num_steps=60")
"""Settings of every arm with --short."""

PLOTTED = {
    "age-0": Style("#444444"),
    "age-4": Style("#1f77b4"),
    "age-8": Style("#2ca02c"),
    "age-4-uncorrected": Style("#1f77b4", dashed=True),
    "age-8-uncorrected": Style("#2ca02c", dashed=True),
}


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="results, one line of JSON a run; added to")
    parser.add_argument("--work", type=Path, help="models and runs; default <out>.files")
    parser.add_argument("--seeds", default="0,1,2,3,4", help="comma-separated")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"comma-separated, of {', '.join(ARMS)}")
    parser.add_argument("--services", action="store_true", help="real services, ages vary up to the arm's")
    parser.add_argument("--plot", type=Path, help="write the curves here (.svg)")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    options = parse(parser, seeds="0", arms="age-4")
    torch.set_num_threads(1)
    if options.short and options.out is None:
        with tempfile.TemporaryDirectory(prefix="age-study-") as folder:
            options.out = Path(folder) / "age.jsonl"
            study(options)
    elif options.out is None:
        parser.error("--out is missing: the file that results are added to")
    else:
        study(options)


def study(options: argparse.Namespace) -> None:
    """Run what is missing in the file of results, and print the table."""
    work = options.work or options.out.with_suffix(".files")
    for name in options.arms.split(","):
        for seed in map(int, options.seeds.split(",")):
            done = {(r["arm"], r["seed"], r["services"]) for r in read_results(options.out)}
            if (name, seed, options.services) in done:
                continue
            run = run_services if options.services else run_lagged
            arm = ARMS[name]
            if options.short:
                arm = arm._replace(settings=(*arm.settings, *SHORT))
            share, held_out = (0.0, 32) if options.short else (STARTS_AT, HELD_OUT)
            result = {"arm": name, "seed": seed, "services": options.services, **run(work, arm, seed, share, held_out)}
            with options.out.open("a") as file:
                file.write(json.dumps(result) + "\n")
            if not options.json:
                print(f"{name}, seed {seed}: {result['after']:.1%} ({result['seconds']:.0f} s)", flush=True)
    results = [r for r in read_results(options.out) if r["services"] == options.services]
    table = summarise(results)
    print(json.dumps(table) if options.json else as_text(table))
    if options.plot:
        plot(results, options.plot)


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the results of earlier calls."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_lagged(work: Path, arm: Arm, seed: int, share: float, held_out: int) -> dict[str, Any]:
    """One run of exactly this age, in this process."""
    files = make_files(work, seed)
    model = imitate_until(files, share, seed)
    settings = (f"policy.model_name={model}", f"grpo.seed={seed}", *arm.settings)
    return train(load_spec(files / "grpo.yaml", settings), files, arm.age, held_out)


def run_services(work: Path, arm: Arm, seed: int, share: float, held_out: int) -> dict[str, Any]:
    """One run with every service, η the arm's age; `age` is the mean of trained tokens over the run's second half."""
    files = make_files(work, seed)
    model = imitate_until(files, share, seed)
    settings = (
        f"policy.model_name={model}",
        f"grpo.seed={seed}",
        f"grpo.max_val_samples={held_out}",
        f"async_grpo.max_trajectory_age_steps={arm.age}",
        *arm.settings,
    )
    spec = load_spec(files / "grpo.yaml", settings)
    directory = work / f"services-{time.time_ns()}"
    with LocalCluster(directory, spec.cluster) as cluster, Client(cluster.address) as client:
        started_s = time.monotonic()
        run = client.wait(client.submit(spec).run_id, timeout_s=SERVICES_TIMEOUT_S)
        seconds = time.monotonic() - started_s
    folder = Path(run.directory)
    summary = json.loads((folder / "summary.json").read_text())
    if summary["state"] != "succeeded":
        raise SystemExit(f"the run {summary['state']}: {summary['message']}; see {folder}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    return {
        "before": summary["reward_before"],
        "after": summary["reward_after"],
        "age": round(statistics.mean(step["age"] for step in steps[len(steps) // 2 :]), 2),
        "effective_sample_size": round(steps[-1]["effective_sample_size"], 4),
        "seconds": round(seconds, 1),
        "rewards": [round(step["reward"], 4) for step in steps],
    }


def summarise(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each arm: over its seeds the mean, the standard error and the extremes of the final share of right answers
    (from 0 to 1), how far that is below the same seeds' at age 0, the batches' reward from step 50 to 60, and means of the
    last step's age and effective sample size and of the seconds."""
    by_arm: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        by_arm[result["arm"]].append(result)
    base = {r["seed"]: r["after"] for r in by_arm.get("age-0", [])}
    table = {}
    for name in sorted(by_arm, key=list(ARMS).index):
        after = [r["after"] for r in by_arm[name]]
        table[name] = {
            "seeds": len(after),
            "before": statistics.mean(r["before"] for r in by_arm[name]),
            "after": statistics.mean(after),
            "standard_error": statistics.stdev(after) / len(after) ** 0.5 if len(after) > 1 else 0.0,
            "lowest": min(after),
            "highest": max(after),
            "below_age_0": statistics.mean(
                [base[r["seed"]] - r["after"] for r in by_arm[name] if r["seed"] in base] or [0.0]
            ),
            "reward_at_60": statistics.mean(statistics.mean(r["rewards"][50:60]) for r in by_arm[name]),
            "age": statistics.mean(r["age"] for r in by_arm[name]),
            "effective_sample_size": statistics.mean(r["effective_sample_size"] for r in by_arm[name]),
            "seconds": statistics.mean(r["seconds"] for r in by_arm[name]),
        }
    return table


def as_text(table: dict[str, dict[str, float]]) -> str:
    """Return the table for people, in Markdown."""
    lines = [
        "| | seeds | before | after | worst seed | points below age 0 | reward at step 60 | age | ESS | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in table.items():
        error = f" ± {100 * row['standard_error']:.1f}" if row["seeds"] > 1 else ""
        lines.append(
            f"| `{name}` | {row['seeds']:.0f} | {row['before']:.1%} | {row['after']:.1%}{error} | "
            f"{row['lowest']:.1%} | {100 * row['below_age_0']:.1f} | {row['reward_at_60']:.1%} | {row['age']:.1f} | "
            f"{row['effective_sample_size']:.3f} | {row['seconds']:.0f} |"
        )
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Reward of the training batches over steps: the mean of an arm's seeds, and their range."""
    curves: dict[str, list[list[float]]] = {}
    for name in PLOTTED:
        runs = [result["rewards"] for result in results if result["arm"] == name]
        if runs:
            curves[name] = runs
    write_curves(path, curves, PLOTTED)


if __name__ == "__main__":
    main()

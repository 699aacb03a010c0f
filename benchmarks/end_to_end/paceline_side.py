"""Paceline's side: the real services as separate processes, a run submitted by the client, and the time of its parts.

It measures completion tokens of the steps after the warm-up, over the seconds between the commits of `trained` of
the first and the last of them. The run is longer than that by the steps that may be generated ahead, so that the
window ends while the sampler still works at its usual pace. `core_seconds_per_step` adds up to the cores of the machine:
CPU seconds of each role's processes, of which `exchange` is the coordinator's plus what the learner spends between two
steps on receipt, next batch and decoding; `idle` is what no process of the benchmark used, whoever used it.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
from transformers import AutoTokenizer

from end_to_end.workload import REWARD_FILE, REWARD_NAME, Workload
from paceline.client import Client, state_name
from paceline.groups import Version
from paceline.rollout.engine import GenerationRequest, SamplingParams
from paceline.rollout.native.batch import DecodeBatch, RunningSequence
from paceline.rollout.native.model import load_native_model
from paceline.services.local.cluster import LocalCluster
from paceline.spec import RunSpec
from paceline.spec.reading import apply_override, parse_spec

ROLES = ("coordinator", "rollout", "reward", "learner")


@dataclass(frozen=True)
class Usage:
    """Resources used up to a moment of the run."""

    cpu_s: dict[str, float]
    """CPU seconds of each role's processes so far."""


def make_spec(directory: Path, workload: Workload, steps: int, overrides: list[str]) -> RunSpec:
    """Return the run on the workload in `directory`: one rollout worker, one learner rank, one thread each, η = 1.

    Everything that is not said here is as the defaults have it.
    """
    tree: dict[str, Any] = {
        "name": "benchmark",
        "policy": {
            "model_name": str(directory / "model"),
            "max_total_sequence_length": workload.max_prompt_tokens + workload.max_new_tokens,
            "train_mb_tokens": 2048,
            "optimizer": {"lr": workload.learning_rate},
            "generation": {
                "max_new_tokens": workload.max_new_tokens,
                "temperature": workload.temperature,
                "max_batch_size": workload.completions_per_step,
            },
        },
        "data": {"train": str(directory / "prompts.jsonl")},
        "rewards": [{"function": f"{REWARD_FILE}:{REWARD_NAME}"}],
        "grpo": {
            "num_prompts_per_step": workload.prompts_per_step,
            "num_generations_per_prompt": workload.completions_per_prompt,
            "max_num_steps": steps,
        },
        "checkpointing": {"enabled": False},
        "cluster": {"rollout_workers": 1, "reward_workers": 1, "learner_ranks": 1},
    }
    for override in overrides:
        apply_override(tree, override)
    spec = parse_spec(tree)
    ahead = spec.async_grpo.max_trajectory_age_steps + 1
    return spec.model_copy(update={"grpo": spec.grpo.model_copy(update={"max_num_steps": steps + ahead})})


def measure(directory: Path, workload: Workload, warm_up: int, steps: int, overrides: list[str]) -> dict[str, Any]:
    """Run `warm_up` + `steps` steps and a few more; return the numbers of `steps` of them."""
    spec = make_spec(directory, workload, warm_up + steps, overrides)
    moments: list[Usage] = []
    with LocalCluster(directory / "runs", spec.cluster) as cluster, Client(cluster.address) as client:
        run = client.submit(spec)
        for event in client.watch(run.run_id):
            if event.kind == "step" and event.content["step"] + 1 in (warm_up, warm_up + steps):
                moments.append(_usage(cluster))
        ended = client.get(run.run_id)
        if state_name(ended) != "succeeded":
            raise SystemExit(f"the run {state_name(ended)}: {ended.message}; see {cluster.directory}/logs")
    lines = (directory / "runs" / run.run_id / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    result = _evaluate(records[warm_up - 1 : warm_up + steps], moments, spec)
    return result | {"prefill_share_of_generate": round(_prefill_share(directory, workload, spec), 3)}


def _prefill_share(directory: Path, workload: Workload, spec: RunSpec) -> float:
    """Return the share of prefill in generation: processor seconds of one step's prompts in the engine's batch, here."""
    model = load_native_model(spec.policy, "cpu", load_weights=True)
    tokenizer = AutoTokenizer.from_pretrained(spec.policy.model_name)
    params = SamplingParams(max_new_tokens=workload.max_new_tokens, temperature=workload.temperature)
    lines = (directory / "prompts.jsonl").read_text().splitlines()[: workload.prompts_per_step]
    sequences = []
    for index, line in enumerate(lines * workload.completions_per_prompt):
        ids = np.asarray(tokenizer(json.loads(line)["prompt"]).input_ids, np.int32)
        request = GenerationRequest(request_id=str(index), prompt_ids=ids, params=params, seed=index)
        limit = request.limit(model.max_tokens, model.vocab_size)
        sequences.append(RunningSequence(request, frozenset(model.stop_token_ids), limit))
    batch = DecodeBatch(model, len(sequences))
    batch.change_version(Version(0, 0), None)
    with torch.inference_mode():
        begin_s = time.process_time()
        batch.add(sequences)
        prefilled_s = time.process_time()
        while batch.sequences:
            batch.step()
    return (prefilled_s - begin_s) / (time.process_time() - begin_s)


def _usage(cluster: LocalCluster) -> Usage:
    cpu_s = {}
    for role in ROLES:
        processes = [psutil.Process(pid) for pid in cluster.pids(role).values()]
        family = [process for parent in processes for process in (parent, *parent.children(recursive=True))]
        cpu_s[role] = sum(process.cpu_times().user + process.cpu_times().system for process in family)
    return Usage(cpu_s)


def _evaluate(records: list[dict[str, Any]], moments: list[Usage], spec: RunSpec) -> dict[str, Any]:
    """`records` begin with the step before the first that is measured: its commit starts the clock."""
    steps = records[1:]
    step_s = (records[-1]["time"] - records[0]["time"]) / len(steps)
    tokens = sum(record["trained_tokens"] for record in steps)
    sequences = spec.grpo.num_prompts_per_step * spec.grpo.num_generations_per_prompt

    def mean(name: str) -> float:
        return sum(record.get(name) or 0.0 for record in steps) / len(steps)

    wait_s, train_s, publish_s = mean("learner_wait_s"), mean("step_s"), mean("publish_wait_s")
    fetch_s = max(step_s - wait_s - train_s - publish_s, 0.0)
    cpu_s = {role: (moments[1].cpu_s[role] - moments[0].cpu_s[role]) / len(steps) for role in moments[0].cpu_s}
    cores_s = (os.cpu_count() or 1) * step_s
    shares_s = {
        "generate": cpu_s["rollout"],
        "score": cpu_s["reward"],
        "exchange": cpu_s["coordinator"] + fetch_s,
        "train": cpu_s["learner"] - publish_s - fetch_s,
        "publish": publish_s,
    }
    shares_s["idle"] = max(cores_s - sum(shares_s.values()), 0.0)
    return {
        "tokens": round(tokens),
        "seconds": round(step_s * len(steps), 3),
        "steps": len(steps),
        "mean_length": round(tokens / len(steps) / sequences, 2),
        "tokens_per_s": round(tokens / (step_s * len(steps)), 1),
        "median_step_s": round(median(intervals_s(record["time"] for record in records)), 3),
        "step_s": round(step_s, 3),
        "mean_age_steps": round(mean("age"), 3),
        "core_seconds_per_step": _rounded(shares_s),
        "exchange_share": round(shares_s["exchange"] / step_s, 4),
        "learner_seconds_per_step": _rounded(
            {"train": train_s, "publish": publish_s, "exchange": fetch_s, "idle": wait_s}
        ),
        "weights": _rounded({name: mean(f"weights/{name}") for name in ("publish_s", "pause_s")}),
    }


def intervals_s(times_s: Iterable[float]) -> list[float]:
    """Differences of neighbours."""
    return [after - before for before, after in itertools.pairwise(times_s)]


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}

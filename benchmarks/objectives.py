"""Every policy objective on the demo's task, before and after: one command, one table.

    python benchmarks/objectives.py [--presets gspo,cispo] [--steps 40] [--lag 2] [--updates 2] [--json] [key=value …]

The demo's model first imitates a teacher who errs in half of its answers, then trains with each preset from there. One
process samples and trains in turn with the services' own engine and trainer; `--lag n` samples with the weights of n steps
ago, which is what an asynchronous run's data looks like, but exactly repeatable. Accuracy is that of 512 sampled answers
to held-out problems. Further arguments change the spec (`paceline/demo/grpo.yaml`). Recorded results: docs/objectives.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from learner.batch import sequences_from_groups
from learner.examples import ExampleSource
from learner.export import export_pretrained
from learner.gather import gather_weights
from learner.trainer import Trainer
from paceline.demo.model import make_tokenizer
from paceline.demo.run import make_files
from paceline.groups import Completion, Group, Version
from paceline.loss_presets import PresetName
from paceline.prompts import encode_prompt
from paceline.spec import RunSpec
from paceline.spec_io import load_spec
from rollout.engine import GenerationRequest, SamplingParams
from rollout.native import NativeEngine

CPU = torch.device("cpu")
HELD_OUT = 512
TOKENIZER = make_tokenizer()


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def imitate_teacher(files: Path, steps: int) -> Path:
    """The demo's first stage, in this process; returns the exported model."""
    spec = load_spec(files / "sft.yaml", (f"sft.max_num_steps={steps}",))
    trainer = Trainer(spec, CPU)
    source = ExampleSource(spec, TOKENIZER)
    for step in range(steps):
        trainer.train_step(source.part(step, 0, 1), step)
    return export_pretrained(
        files / "taught", gather_weights(trainer.model, None), model_name=spec.policy.model_name
    )


async def sample(
    engine: NativeEngine, spec: RunSpec, rows: list[dict[str, str]], each: int, seed: int
) -> list[Group]:
    """One scored group for each row, with `each` completions."""
    params = SamplingParams.from_spec(spec.policy.generation)
    prompts = [encode_prompt(TOKENIZER, row["prompt"], spec.data.apply_chat_template) for row in rows]
    requests = [
        GenerationRequest(f"{seed}-{i}-{c}", prompt_ids, params, seed=hash((seed, i, c)) & 0x7FFFFFFF)
        for i, prompt_ids in enumerate(prompts)
        for c in range(each)
    ]
    async with asyncio.timeout(120):
        completions = await asyncio.gather(*(engine.generate(request) for request in requests))
    groups = []
    for i, (row, prompt_ids) in enumerate(zip(rows, prompts, strict=True)):
        own = tuple(with_text(completion) for completion in completions[i * each : (i + 1) * each])
        rewards_CF = np.array([[float(c.text == row["answer"])] for c in own], np.float32)
        groups.append(Group(seed * 100_000 + i, prompt_ids, own, rewards_CF=rewards_CF))
    return groups


def with_text(completion: Completion) -> Completion:
    return replace(completion, text=TOKENIZER.decode(completion.token_ids, skip_special_tokens=True))


def accuracy(groups: list[Group]) -> float:
    return float(np.mean([group.rewards_CF.mean() for group in groups if group.rewards_CF is not None]))


async def train(
    spec: RunSpec, train_rows: list[dict[str, str]], held_out: list[dict[str, str]], lag: int
) -> dict[str, Any]:
    """One run; accuracy before and after, and how far the data was off-policy at its end."""
    started_s = time.monotonic()
    trainer = Trainer(spec, CPU)
    engine = NativeEngine(spec)
    published = deque([(0, gather_weights(trainer.model, None))], maxlen=lag + 1)
    dice = random.Random(spec.grpo.seed)
    metrics: dict[str, float] = {}
    try:
        await engine.update_weights(Version(1, 0), published[0][1])
        before = accuracy(await sample(engine, spec, held_out, 1, seed=9_000_001))
        for step in range(spec.grpo.max_num_steps):
            rows = dice.sample(train_rows, spec.grpo.num_prompts_per_step)
            groups = await sample(engine, spec, rows, spec.grpo.num_generations_per_prompt, seed=step)
            metrics = trainer.train_step(sequences_from_groups(groups, spec), step)
            published.append((step + 1, gather_weights(trainer.model, None)))
            oldest, weights = published[0]
            await engine.update_weights(Version(1, oldest), weights)
        await engine.update_weights(Version(1, spec.grpo.max_num_steps), published[-1][1])
        after = accuracy(await sample(engine, spec, held_out, 1, seed=9_000_001))
    finally:
        await engine.close()
    return {
        "before": before,
        "after": after,
        "effective_sample_size": metrics["effective_sample_size"],
        "clip_fraction": metrics["clip_fraction"],
        "drop_fraction": metrics["drop_fraction"],
        "entropy": metrics["entropy"],
        "seconds": time.monotonic() - started_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", default=",".join(get_args(PresetName)), help="comma-separated")
    parser.add_argument("--steps", type=int, default=40, help="steps of each preset")
    parser.add_argument("--lag", type=int, default=2, help="age of the sampler's weights in steps")
    parser.add_argument("--updates", type=int, default=2, help="updates that each batch gets")
    parser.add_argument("--teacher-steps", type=int, default=600)
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        files = make_files(Path(name), seed=0)
        taught = imitate_teacher(files, options.teacher_steps)
        train_rows, held_out = (
            read_rows(files / "data" / f"{part}.jsonl") for part in ("train", "validation")
        )
        if not options.json:
            print(f"{'preset':<24}{'before':>8}{'after':>8}{'ESS':>7}{'clipped':>9}{'dropped':>9}{'s':>6}")
        for preset in options.presets.split(","):
            settings = (
                f"policy.model_name={taught}",
                f"grpo.max_num_steps={options.steps}",
                f"policy.num_updates_per_step={options.updates}",
            )
            spec = preset_spec(files, preset, (*settings, *options.overrides))
            row = table[preset] = asyncio.run(train(spec, train_rows, held_out[:HELD_OUT], options.lag))
            if not options.json:
                print(
                    f"{preset:<24}{row['before']:8.3f}{row['after']:8.3f}{row['effective_sample_size']:7.3f}"
                    f"{row['clip_fraction']:9.3f}{row['drop_fraction']:9.3f}{row['seconds']:6.0f}",
                    flush=True,
                )
    if options.json:
        print(json.dumps(table))
    sys.exit(int(any(row["after"] <= row["before"] for row in table.values())))


def preset_spec(files: Path, preset: str, settings: tuple[str, ...]) -> RunSpec:
    """The demo's second stage with a preset in place of its own loss."""
    spec = load_spec(files / "grpo.yaml", settings)
    whole = spec.model_dump(exclude_unset=True)
    whole["loss_fn"] = {"preset": preset}
    whole["grpo"].pop("advantage", None)
    for setting in settings:
        key, _, value = setting.partition("=")
        section, _, field = key.partition(".")
        if section == "loss_fn":
            whole["loss_fn"][field] = json.loads(value)
        if key == "grpo.advantage":
            whole["grpo"]["advantage"] = value
    return RunSpec.model_validate(whole)


if __name__ == "__main__":
    main()

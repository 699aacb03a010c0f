"""One policy run on the demo's task in one process: the services' own engine and trainer, taking turns.

With `lag` k, step s is sampled by the weights of version max(s - k, 0): from step k on every token is exactly k steps old.
The same seed gives the same numbers, which no run with real services can promise, and an hour's study fits on one core.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from paceline.data.tokens import encode_prompt
from paceline.groups import Completion, Group, Version
from paceline.learner.batch.samples import sequences_from_groups
from paceline.learner.checkpoints.export import export_pretrained
from paceline.learner.objectives.examples import ExampleSource
from paceline.learner.step.trainer import Trainer
from paceline.learner.weights.gather import gather_weights
from paceline.rollout.engine import GenerationRequest, SamplingParams
from paceline.rollout.native.engine import NativeEngine
from paceline.services.demo.task import make_tokenizer
from paceline.spec import RunSpec
from paceline.spec.reading import load_spec
from paceline.spec.sections.loss import PresetName

CPU = torch.device("cpu")
SAMPLE_TIMEOUT_S = 300.0
EVALUATION_SEED = 9_000_001
MAX_TEACHER_STEPS = 2000
METRICS = ("effective_sample_size", "clip_fraction", "drop_fraction", "truncation_fraction", "entropy", "age")
SHOWN = ("effective_sample_size", "clip_fraction", "drop_fraction")
NAMES = get_args(PresetName)
TOKENIZER = make_tokenizer()


def run(name: str, files: Path, taught: Path, options: Any) -> dict[str, Any]:
    """The row of one preset in `benchmarks/objectives.py`."""
    settings = (
        f"policy.model_name={taught}",
        f"grpo.max_num_steps={options.steps}",
        f"grpo.num_prompts_per_step={options.prompts}",
        f"policy.num_updates_per_step={options.updates}",
        *options.overrides,
    )
    result = train(preset_spec(files, name, settings), files, options.lag, options.held_out)
    return {"measure": "right answers"} | {
        key: result[key] for key in ("before", "after", "seconds", *SHOWN) if key in result
    }


def preset_spec(files: Path, preset: str, settings: tuple[str, ...]) -> RunSpec:
    """The demo's second stage with a preset in place of its own loss."""
    spec = load_spec(files / "grpo.yaml", settings)
    whole = spec.model_dump(exclude_unset=True)
    whole["loss_fn"] = {"preset": preset}
    whole["grpo"].pop("advantage", None)
    if preset == "ppo":
        whole["value"] = {"optimizer": whole["policy"]["optimizer"]}
    for setting in settings:
        key, _, value = setting.partition("=")
        section, _, field = key.partition(".")
        if section == "loss_fn":
            whole["loss_fn"][field] = json.loads(value)
        if key == "grpo.advantage":
            whole["grpo"]["advantage"] = value
    return RunSpec.model_validate(whole)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def imitate_teacher(files: Path, steps: int, seed: int = 42) -> Path:
    """The demo's first stage, in this process; returns the exported model, made once."""
    taught = files / f"taught-{steps}"
    return taught if taught.is_dir() else asyncio.run(_imitate(files, taught, steps, seed))


def imitate_until(files: Path, share: float, seed: int) -> Path:
    """The same, until the share of right answers (512 sampled, to training problems, every 25 steps) is at least this."""
    taught = files / f"taught-to-{share}"
    if taught.is_dir():
        return taught
    return asyncio.run(_imitate(files, taught, MAX_TEACHER_STEPS, seed, share))


async def _imitate(files: Path, taught: Path, steps: int, seed: int, share: float | None = None) -> Path:
    spec = load_spec(files / "sft.yaml", (f"sft.max_num_steps={steps}", f"sft.seed={seed}"))
    trainer = Trainer(spec, CPU)
    source = ExampleSource(spec, TOKENIZER, trainer.objective)
    for step in range(steps):
        trainer.train_step(source.of_step(step, 0, 1), step)
        if share is not None and step % 25 == 24 and await _right_answers(trainer, files) >= share:
            break
    return export_pretrained(taught, gather_weights(trainer.model, None), model_name=spec.policy.model_name)


async def _right_answers(trainer: Trainer, files: Path) -> float:
    spec = load_spec(files / "grpo.yaml", (f"policy.model_name={files / 'model'}",))
    engine = NativeEngine(spec)
    try:
        await engine.update_weights(Version(1, 0), gather_weights(trainer.model, None))
        rows = read_rows(files / "data" / "train.jsonl")[:512]
        return mean_reward(await sample(engine, spec, rows, 1, EVALUATION_SEED))
    finally:
        await engine.close()


def train(spec: RunSpec, files: Path, lag: int, held_out: int) -> dict[str, Any]:
    """One run: `before` and `after` are the share of right answers, sampled at temperature 1, one for each of the first
    `held_out` problems that training never shows; `rewards` is the mean reward of every batch."""
    return asyncio.run(_train(spec, files, lag, held_out))


async def _train(spec: RunSpec, files: Path, lag: int, held_out: int) -> dict[str, Any]:
    started_s = time.monotonic()
    rows, unseen = (read_rows(files / "data" / f"{part}.jsonl") for part in ("train", "validation"))
    unseen = unseen[:held_out]
    trainer = Trainer(spec, CPU)
    engine = NativeEngine(spec)
    published = deque([(0, gather_weights(trainer.model, None))], maxlen=lag + 1)
    dice = random.Random(spec.grpo.seed)
    metrics: dict[str, float] = {}
    rewards = []
    try:
        await engine.update_weights(Version(1, 0), published[0][1])
        before = mean_reward(await sample(engine, spec, unseen, 1, seed=EVALUATION_SEED))
        for step in range(spec.grpo.max_num_steps):
            drawn = dice.sample(rows, spec.grpo.num_prompts_per_step)
            groups = await sample(engine, spec, drawn, spec.grpo.num_generations_per_prompt, seed=step)
            metrics = trainer.train_step(sequences_from_groups(groups, spec), step)
            rewards.append(mean_reward(groups))
            published.append((step + 1, gather_weights(trainer.model, None)))
            oldest, weights = published[0]
            await engine.update_weights(Version(1, oldest), weights)
        await engine.update_weights(Version(1, spec.grpo.max_num_steps), published[-1][1])
        after = mean_reward(await sample(engine, spec, unseen, 1, seed=EVALUATION_SEED))
    finally:
        await engine.close()
    last = {name: round(metrics[name], 4) for name in METRICS if name in metrics}
    return {
        "before": round(before, 4),
        "after": round(after, 4),
        **last,
        "seconds": round(time.monotonic() - started_s, 1),
        "rewards": [round(reward, 4) for reward in rewards],
    }


async def sample(engine: NativeEngine, spec: RunSpec, rows: list[dict[str, str]], each: int, seed: int) -> list[Group]:
    """One scored group for each row, with `each` completions."""
    params = SamplingParams.from_spec(spec.policy.generation)
    prompts = [encode_prompt(TOKENIZER, row["prompt"], spec.data.apply_chat_template) for row in rows]
    requests = [
        GenerationRequest(f"{seed}-{i}-{c}", prompt_ids, params, seed=hash((spec.seed, seed, i, c)) & 0x7FFFFFFF)
        for i, prompt_ids in enumerate(prompts)
        for c in range(each)
    ]
    async with asyncio.timeout(SAMPLE_TIMEOUT_S):
        completions = await asyncio.gather(*(engine.generate(request) for request in requests))
    groups = []
    for i, (row, prompt_ids) in enumerate(zip(rows, prompts, strict=True)):
        own = tuple(with_text(completion) for completion in completions[i * each : (i + 1) * each])
        rewards_CF = np.array([[float(c.text == row["answer"])] for c in own], np.float32)
        groups.append(Group(seed * 100_000 + i, prompt_ids, own, rewards_CF=rewards_CF))
    return groups


def with_text(completion: Completion) -> Completion:
    """The completion with what its tokens say."""
    return replace(completion, text=TOKENIZER.decode(completion.token_ids, skip_special_tokens=True))


def mean_reward(groups: list[Group]) -> float:
    """Over all completions, from 0 to 1."""
    return float(np.mean([group.rewards_CF.mean() for group in groups if group.rewards_CF is not None]))

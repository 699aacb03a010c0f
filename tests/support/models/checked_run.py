"""Steps of a run whose completions were sampled under several versions, by workers with right and wrong weights."""

from __future__ import annotations

import copy
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_policy import CPU, VOCABULARY, make_spec
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.groups import Completion, Group, IntArray, Rows, Turn, VersionSpan
from paceline.learner.batch.samples import sequences_from_groups
from paceline.learner.step.sampler_check import Difference, SamplerCheck
from paceline.learner.step.trainer import Trainer
from paceline.learner.weights.gather import gather_merged

SESSION = 3
LENGTH = 24
GROUPS, COMPLETIONS = 2, 2


def checked_steps(
    model: Path,
    steps: int,
    *,
    max_age: int,
    rank: int = 0,
    ranks: int = 1,
    episodes: bool = False,
    checks: bool = True,
    rounded: torch.dtype = torch.float32,
    session: int = SESSION,
    **sections: Any,
) -> tuple[list[list[Difference]], dict[str, float], dict[str, torch.Tensor]]:
    """Train `steps` steps at a constant age of `max_age`, in the learner's session `session`. In each completion the worker
    `first` samples half of the tokens, then `second` half of the rest, an update comes, and `second` goes on. In the last
    group `second` samples with a first layer two versions old. Each of two ranks has one group. Return this rank's
    comparisons of each step, the metrics of the last step, and the parameters at the end, whole."""
    policy = sections.pop("policy", {})
    sections.setdefault("async_grpo", {}).setdefault("max_trajectory_age_steps", max_age)
    spec = make_spec(model, sections=sections, train_mb_tokens=80, **policy)
    torch.manual_seed(0)
    trainer = Trainer(spec, CPU)
    check = SamplerCheck(trainer, session)
    snapshots: deque[PreTrainedModel] = deque()
    found, metrics = [], {}
    for step in range(steps):
        snapshots.append(snapshot(model, trainer, rounded))
        rng = np.random.default_rng(step)
        groups = [group_of(number, step, max_age, list(snapshots), rng, episodes=episodes) for number in range(GROUPS)]
        mine = groups[rank::ranks]
        samples = sequences_from_groups(mine, spec)
        if checks:
            found.append(check.compare(mine, samples, {group.group_id for group in groups}, step))
            check.keep(step)
        metrics = trainer.train_step(samples, step)
    return found, metrics, whole_parameters(trainer)


def whole_parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in trainer.model.named_parameters()
    }


def snapshot(model: Path, trainer: Trainer, rounded: torch.dtype) -> PreTrainedModel:
    """Return a model with the trainer's present weights, rounded as if they were published in that type."""
    copied: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    has_adapter = trainer.spec.policy.lora_cfg.enabled
    whole = gather_merged(trainer.model) if has_adapter else whole_parameters(trainer)
    state = {name: tensor.to(rounded).float() for name, tensor in whole.items()}
    missing, unexpected = copied.load_state_dict(state, strict=False)
    assert not unexpected
    assert all("lm_head" in name for name in missing)
    return copied


def group_of(
    number: int, step: int, max_age: int, snapshots: list[PreTrainedModel], rng: np.random.Generator, *, episodes: bool
) -> Group:
    older = max(step - max_age, 0)
    newer = min(older + 1, step)
    is_wrong = number == GROUPS - 1
    spans = [VersionSpan(SESSION, older, 0, LENGTH // 2, "first")]
    spans += [VersionSpan(SESSION, older, LENGTH // 2, 3 * LENGTH // 4, "second")]
    spans += [VersionSpan(SESSION, newer, 3 * LENGTH // 4, LENGTH, "second")]
    prompt_ids = rng.integers(0, VOCABULARY, 5).astype(np.int32)
    completions, turns = [], []
    for index in range(COMPLETIONS):
        ids = rng.integers(0, VOCABULARY, LENGTH).astype(np.int32)
        logprobs = np.zeros(LENGTH, np.float32)
        for span in spans:
            weights = snapshots[span.step]
            if is_wrong and span.sampler == "second":
                weights = with_older_layer(weights, snapshots[max(span.step - 2, 0)])
            logprobs[span.start : span.end] = logprobs_of(weights, prompt_ids, ids)[span.start : span.end]
        completions.append(Completion(ids, logprobs, tuple(spans), "stop"))
        turns += [Turn(index, 0, LENGTH // 2, 0.0), Turn(index, LENGTH // 2 + 2, LENGTH, 0.0)]
    rewards_CF = rng.normal(size=(COMPLETIONS, 1)).astype(np.float32)
    group = Group(10 * step + number, prompt_ids, tuple(completions), rewards_CF=rewards_CF)
    return _as_episodes(group, turns) if episodes else group


def _as_episodes(group: Group, turns: list[Turn]) -> Group:
    """Let an environment answer with two tokens behind the first half of each completion."""
    rows = []
    for completion in group.completions:
        sampled_T = np.ones(LENGTH, np.bool_)
        sampled_T[LENGTH // 2 : LENGTH // 2 + 2] = False
        first, second, last = completion.spans
        spans = (first, second._replace(start=LENGTH // 2 + 2), last)
        logprobs = np.where(sampled_T, completion.logprobs, np.float32(0))
        rows.append(
            Completion(completion.token_ids, logprobs, spans, "stop", prompt_ids=group.prompt_ids, sampled_T=sampled_T)
        )
    samples = tuple(range(COMPLETIONS))
    return Group(
        group.group_id,
        group.prompt_ids,
        tuple(rows),
        rewards_CF=group.rewards_CF,
        rows=Rows(COMPLETIONS, samples, tuple(turns)),
    )


def with_older_layer(weights: PreTrainedModel, older: PreTrainedModel) -> PreTrainedModel:
    mixed = copy.deepcopy(weights)
    mixed.model.layers[0].load_state_dict(older.model.layers[0].state_dict())
    return mixed


@torch.no_grad()
def logprobs_of(weights: PreTrainedModel, prompt_ids: IntArray, ids: IntArray) -> np.ndarray:
    """Return [T] log-probabilities at the temperature of `make_spec`, by transformers' own forward pass."""
    row = torch.from_numpy(np.concatenate((prompt_ids, ids)).astype(np.int64))[None]
    logits = weights(row).logits[0, len(prompt_ids) - 1 : -1].double() / 0.8
    values: np.ndarray = logits.log_softmax(-1).gather(1, row[0, len(prompt_ids) :, None])[:, 0].float().numpy()
    return values

"""Phase of a step that computes advantages from the rewards or from a value model.

There are two sources, by grpo.advantage: the rewards of the whole batch, relative to the group or to the batch, or a
value model. A distillation's advantages depend on the policy that is training, so its objective computes them and this
phase assigns none. Tokens of episodes get their advantages by turn, which needs no collective, because a group is whole
on one rank.

Promise: every token gets the same advantage however the batch is split over ranks and micro-batches.

Suffixes: M states of the value model, N tokens, S sequences, C samples, F reward functions, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from paceline.advantages import Episode, Float64Array, IndexArray, group_totals, totals, turn_advantages
from paceline.errors import InvalidInput
from paceline.learner.advantages import (
    TOKEN_WHITENED,
    ScoredBatch,
    batch_advantages,
    gae,
    whitened,
    whitened_token_advantages,
)
from paceline.learner.batch.samples import TrainingSample
from paceline.learner.collectives import max_over_ranks, rows_of_all_ranks, sum_over_ranks
from paceline.learner.objectives.corrections import per_sequence
from paceline.learner.objectives.policy import kl_to_reference
from paceline.learner.step.critic import Critic
from paceline.learner.step.plan import MicroBatch, States, Update, given
from paceline.spec import RunSpec


def with_advantages(
    batch: Sequence[TrainingSample],
    updates: Sequence[Update],
    spec: RunSpec,
    device: torch.device,
    critic: Critic | None,
    step: int = 0,
) -> list[Update]:
    """Return the updates with an advantage for each token, not clipped yet; dummies get 0. The weights of the rewards
    are those of `step`. All ranks call it together, after `with_frozen_logprobs`. Traces get the advantages that the
    data set determines; other examples and the rollouts of a distillation get none."""
    if spec.trains_traces:
        return _of_data_set(batch, updates, device)
    if not spec.samples or spec.has_teacher:
        return list(updates)
    if critic is not None:
        return _by_value_model(batch, updates, spec, device, critic, step)
    micro_batches = _real(updates)
    penalties = [_kl_penalties(micro, spec) for micro in micro_batches]
    samples = sample_of_each(batch)
    scores = _scores(batch, samples, micro_batches, penalties, spec)
    rows, first = rows_of_all_ranks(scores.to(device))
    table = rows.double().cpu().numpy()
    scored = ScoredBatch(table[:, 0].astype(np.int64), table[:, 2:], table[:, 1])
    advantages_C = batch_advantages(scored, spec, step)[first : first + len(scores)]
    if spec.environment.advantage != "outcome":
        by_token = advantages_of_turns(batch, samples, advantages_C, scores.numpy(), spec, step)
        return _replaced(updates, [_with_turns(batch, by_token, micro, device) for micro in micro_batches])
    by_sample = torch.from_numpy(advantages_C[samples])
    advantages = [
        by_sample[torch.tensor(micro.indices)].to(device, torch.float32)[micro.packed.sequence_N]
        for micro in micro_batches
    ]
    if spec.grpo.advantage in TOKEN_WHITENED:
        advantages = whitened_token_advantages(
            advantages, penalties, [m.packed.sequence_N for m in micro_batches], device
        )
    return _replaced(updates, [replace(m, advantages_N=v) for m, v in zip(micro_batches, advantages, strict=True)])


def with_clipped_advantages(
    updates: Sequence[Update], spec: RunSpec, device: torch.device
) -> tuple[list[Update], dict[str, float]]:
    """Return the updates with advantages clipped to grpo.advantage_clip_low and advantage_clip_high, and as a metric
    the largest absolute value before clipping. All ranks call it together."""
    real = _real(updates)
    assigned = [micro.advantages_N for micro in real if micro.advantages_N is not None]
    if not any(m.advantages_N is not None for update in updates for m in update.micro_batches):
        return list(updates), {}
    largest = [advantages_N.abs().max() for advantages_N in assigned if len(advantages_N)]
    none = torch.zeros((), dtype=torch.float32, device=device)
    metrics = {"advantage_max": max_over_ranks(torch.stack([none, *largest]).max()).item()}
    low, high = spec.grpo.advantage_clip_low, spec.grpo.advantage_clip_high
    if low is None and high is None:
        return list(updates), metrics
    clipped = [replace(m, advantages_N=given(m.advantages_N).clamp(low, high)) for m in real]
    return _replaced(updates, clipped), metrics


def _of_data_set(batch: Sequence[TrainingSample], updates: Sequence[Update], device: torch.device) -> list[Update]:
    advantages_S = torch.tensor([sample.advantage or 0.0 for sample in batch], dtype=torch.float32)

    def advantages_of(micro: MicroBatch) -> Tensor:
        return advantages_S[torch.tensor(micro.indices)].to(device)[micro.packed.sequence_N]

    return _replaced(updates, [replace(m, advantages_N=advantages_of(m)) for m in _real(updates)])


def _by_value_model(
    batch: Sequence[TrainingSample],
    updates: Sequence[Update],
    spec: RunSpec,
    device: torch.device,
    critic: Critic,
    step: int,
) -> list[Update]:
    """Return the updates with GAE, whitened over the batch, and with the returns that the value model trains on."""
    updates = critic.with_states(batch, updates)
    real = _real(updates)
    raw, with_returns = [], []
    for micro in real:
        advantages_N, states = _gae(batch, micro, spec, device, step)
        raw.append(advantages_N)
        with_returns.append(states)
    advantages = whitened(raw, [given(states.scored_N) for states in with_returns], device)
    assigned = [
        replace(micro, advantages_N=advantages_N, states=states)
        for micro, advantages_N, states in zip(real, advantages, with_returns, strict=True)
    ]
    updates = _replaced(updates, assigned)
    tokens_U = [
        sum(given(_states(m).scored_N).sum().item() for m in u.micro_batches if not m.is_dummy) for u in updates
    ]
    sums_U = sum_over_ranks(torch.tensor(tokens_U, dtype=torch.float64, device=device)).tolist()
    return [replace(update, num_scored_tokens=total) for update, total in zip(updates, sums_U, strict=True)]


def _gae(
    batch: Sequence[TrainingSample], micro: MicroBatch, spec: RunSpec, device: torch.device, step: int
) -> tuple[Tensor, States]:
    states = _states(micro)
    sequences = [batch[i] for i in micro.indices]
    lengths_S = np.array([len(s.completion_ids) for s in sequences])
    ends_S = lengths_S.cumsum() - 1
    rewards_SF = np.stack([_rewards(s, spec) for s in sequences])
    totals_S = totals(rewards_SF, spec.rewards, step)
    rewards_N = np.zeros(int(lengths_S.sum()))
    penalty_N = _kl_penalties(micro, spec)
    if penalty_N is not None:
        rewards_N -= penalty_N.double().cpu().numpy()
    rewards_N[ends_S] += np.nan_to_num(totals_S, nan=0.0)
    before_M = states.before_token_M.cpu().numpy()
    values_M = states.values_M.double().cpu().numpy()
    truncated_S = np.array([s.truncated for s in sequences])
    advantages_N, returns_N = gae(
        rewards_N,
        values_M[before_M],
        np.where(truncated_S, values_M[~before_M], 0.0),
        lengths_S,
        spec.value.gae_gamma,
        spec.value.gae_lambda,
    )
    with_returns = replace(
        states,
        returns_N=torch.from_numpy(returns_N).to(device, torch.float32),
        scored_N=torch.from_numpy(np.repeat(~np.isnan(totals_S), lengths_S)).to(device),
    )
    return torch.from_numpy(advantages_N).to(device, torch.float32), with_returns


def _scores(
    batch: Sequence[TrainingSample],
    samples: IndexArray,
    micro_batches: Sequence[MicroBatch],
    penalties: Sequence[Tensor | None],
    spec: RunSpec,
) -> Tensor:
    """Return [C, 2 + F] float64: group id, β·ΣKL (over all transcripts) and rewards of this rank's samples."""
    scores = torch.zeros(int(samples.max(initial=-1)) + 1, 2 + len(spec.rewards), dtype=torch.float64)
    for sample, sequence in zip(samples.tolist(), batch, strict=True):
        scores[sample, 0] = sequence.group_id
        scores[sample, 2:] = torch.from_numpy(_rewards(sequence, spec))
    for micro, penalty_N in zip(micro_batches, penalties, strict=True):
        if penalty_N is not None:
            sums_S = per_sequence(penalty_N.double(), micro.packed.sequence_N, len(micro.indices))
            scores[:, 1].index_add_(0, torch.from_numpy(samples[list(micro.indices)]), sums_S.cpu())
    return scores


def _with_turns(
    batch: Sequence[TrainingSample], by_token: Sequence[Float64Array], micro: MicroBatch, device: torch.device
) -> MicroBatch:
    values = [
        by_token[i][np.ones(len(by_token[i]), bool) if (t := batch[i].trained_T) is None else t] for i in micro.indices
    ]
    return replace(micro, advantages_N=torch.from_numpy(np.concatenate(values)).to(device, torch.float32))


def _rewards(sequence: TrainingSample, spec: RunSpec) -> Float64Array:
    """Return [F] the sequence's rewards. Raises InvalidInput if they are missing."""
    if sequence.rewards_F is None or len(sequence.rewards_F) != len(spec.rewards):
        raise InvalidInput(
            f"group {sequence.group_id} has no rewards for the {len(spec.rewards)} functions; "
            f"grpo.advantage {spec.grpo.advantage!r} is computed from them"
        )
    return sequence.rewards_F.astype(np.float64)


def _kl_penalties(micro: MicroBatch, spec: RunSpec) -> Tensor | None:
    """Return [N] β·KL of π_prox to the reference, if it belongs to the reward."""
    if not spec.loss_fn.use_kl_in_reward:
        return None
    proximal_N = given(micro.frozen.proximal_N)
    kl_N = kl_to_reference(
        proximal_N, given(micro.frozen.reference_N), torch.ones_like(proximal_N), spec.loss_fn.reference_policy_kl_type
    )
    return spec.loss_fn.reference_policy_kl_penalty * kl_N


def _states(micro: MicroBatch) -> States:
    if micro.states is None:
        raise ValueError("this micro-batch has no states of the value model; call `Critic.with_states` first")
    return micro.states


def _real(updates: Sequence[Update]) -> list[MicroBatch]:
    return [m for update in updates for m in update.micro_batches if not m.is_dummy]


def _replaced(updates: Sequence[Update], real: Sequence[MicroBatch]) -> list[Update]:
    """Return the updates with `real` in place of `_real(updates)`. Tokens of dummies get the advantage 0."""
    rest = iter(real)

    def replacement(micro: MicroBatch) -> MicroBatch:
        if not micro.is_dummy:
            return next(rest)
        return replace(micro, advantages_N=torch.zeros_like(micro.packed.targets_N, dtype=torch.float32))

    return [replace(u, micro_batches=tuple(replacement(m) for m in u.micro_batches)) for u in updates]


def sample_of_each(batch: Sequence[TrainingSample]) -> IndexArray:
    """Return [S]: the index of each sequence's sample, in order; transcripts of an episode share one sample."""
    return np.cumsum([sequence.counts for sequence in batch], dtype=np.int64) - 1


def advantages_of_turns(
    batch: Sequence[TrainingSample],
    samples_S: IndexArray,
    advantages_C: Float64Array,
    scores: Float64Array,
    spec: RunSpec,
    step: int,
) -> list[Float64Array]:
    """Return the [T] advantages of each sequence's tokens, as `environment.advantage` says; tokens outside turns get 0.
    advantages_C: of whole samples. scores: [C, 2 + F] group id, β·ΣKL and rewards of the samples."""
    rewards: list[list[float]] = [[] for _ in advantages_C]
    for sample, sequence in zip(samples_S.tolist(), batch, strict=True):
        rewards[sample] += (
            [turn.reward for turn in sequence.transcript.turns] if sequence.transcript is not None else []
        )
    by_sample: list[Float64Array] = [np.zeros(0)] * len(rewards)
    group_ids_C = scores[:, 0].astype(np.int64)
    for group_id in np.unique(group_ids_C):
        of_group = np.flatnonzero(group_ids_C == group_id)
        outcomes_C = group_totals(scores[of_group, 2:], spec.rewards, step) - scores[of_group, 1]
        episodes = [
            Episode(outcome, float(advantages_C[c]), np.array(rewards[c], np.float64))
            for c, outcome in zip(of_group, outcomes_C.tolist(), strict=True)
        ]
        for c, values_K in zip(of_group, turn_advantages(episodes, spec), strict=True):
            by_sample[c] = values_K
    tokens = [np.zeros(len(sequence.completion_ids)) for sequence in batch]
    for sample, sequence, values_T in zip(samples_S.tolist(), batch, tokens, strict=True):
        if sequence.transcript is not None:
            for offset, turn in enumerate(sequence.transcript.turns):
                values_T[turn.start : turn.end] = by_sample[sample][sequence.transcript.first_turn + offset]
    return tokens

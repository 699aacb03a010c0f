"""The value model of PPO: what it says of a batch, the advantages and returns that follow, and its own update.

Promise: advantages, returns and the value loss are those of the global batch, however it is split over micro-batches and
ranks; a dummy micro-batch takes part in every pass, since under FSDP each is a collective.

The order inside a step, the same on all ranks: `look` (values of every state, no gradient), `settle` (advantages for the
policy, returns for the value model), then for each update `accumulate` beside the policy's passes, `gradient_norm`, `step`.

A completion of T tokens has T + 1 states: before each token, and after the last one. Suffixes: N tokens of a micro-batch,
M its states (N + S), S its sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from learner.advantages.gae import gae, value_losses
from learner.advantages.group import weighted_rewards
from learner.advantages.whole_batch import whitened
from learner.batch.samples import PackedBatch, TrainingSample, pack_row
from learner.collectives import sum_over_ranks
from learner.model.policy import load_reward_model
from learner.step.gradients import clip_gradients, gradient_norm, set_gradient_sync
from learner.step.optimizer import make_optimizer, set_learning_rate
from learner.step.update import MicroBatch, Update, kl_penalties, require_rewards
from paceline.spec import RunSpec


@dataclass
class States:
    """What the value model is asked about a micro-batch, and what it should say."""

    row: PackedBatch
    before_token_M: Tensor
    """True for the states before a token, False for the one after a sequence's last."""
    values_M: Tensor | None = None
    """At the start of the step."""
    returns_N: Tensor | None = None
    scored_N: Tensor | None = None
    """False for tokens of sequences without a reward: they train nothing."""


class Critic:
    """Value model and optimizer of one rank. Both are public: checkpoints read them between steps."""

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        starts_from = spec.value.model_name or spec.policy.model_name
        self.model: PreTrainedModel = load_reward_model(
            spec.policy.model_copy(update={"model_name": starts_from}), device
        )
        self.optimizer = make_optimizer(self.model, spec.value.optimizer)
        self._tokens: dict[int, float] = {}
        self._states: dict[int, States] = {}
        self._sums: dict[str, float] = {}
        self._norms: list[float] = []

    @torch.no_grad()
    def look(self, batch: Sequence[TrainingSample], updates: Sequence[Update]) -> None:
        """Asks for the value of every state of the step's batch."""
        self._states, self._sums, self._norms = {}, {}, []
        for micro in (micro for update in updates for micro in update.micro_batches):
            states = self._states[id(micro)] = _states_of([batch[i] for i in micro.places], self._device)
            states.values_M = self._values(states)

    def settle(self, batch: Sequence[TrainingSample], updates: Sequence[Update]) -> None:
        """Gives every token of the policy's rows its advantage, whitened over the batch, and the states their returns."""
        real = [m for update in updates for m in update.micro_batches if not m.is_dummy]
        raw = [self._settle_micro(batch, micro) for micro in real]
        scored = [_given(self._states[id(micro)].scored_N) for micro in real]
        low, high = self._spec.grpo.advantage_clip_low, self._spec.grpo.advantage_clip_high
        for micro, value_N in zip(real, whitened(raw, scored, self._device), strict=True):
            if low is not None or high is not None:
                value_N = value_N.clamp(low, high)
            micro.row = replace(micro.row, advantages_N=value_N)
        tokens_U = torch.tensor(
            [
                sum(
                    _given(self._states[id(m)].scored_N).sum().item()
                    for m in u.micro_batches
                    if not m.is_dummy
                )
                for u in updates
            ],
            dtype=torch.float64,
            device=self._device,
        )
        totals = sum_over_ranks(tokens_U).tolist()
        self._tokens = {id(update): total for update, total in zip(updates, totals, strict=True)}

    def accumulate(self, update: Update, micro: MicroBatch, world_size: int, *, is_last: bool) -> None:
        """Forward and backward of one micro-batch; the value loss is the mean over the update's scored tokens."""
        states = self._states[id(micro)]
        set_gradient_sync(self.model, self._device, is_last)
        values_N = self._values(states)[states.before_token_M]
        if micro.is_dummy:
            (values_N.sum() * 0.0).backward()  # type: ignore[no-untyped-call]
            return
        old_N = _given(states.values_M)[states.before_token_M]
        returns_N, scored_N = _given(states.returns_N), _given(states.scored_N)
        losses_N, clipped_N = value_losses(values_N, old_N, returns_N, self._spec.value.cliprange)
        losses_N = losses_N.masked_fill(~scored_N, 0.0)
        loss = losses_N.sum() / max(self._tokens[id(update)], 1.0)
        (loss * world_size).backward()  # type: ignore[no-untyped-call]
        seen = returns_N[scored_N].double()
        for name, value in (
            ("value_loss", loss),
            ("tokens", scored_N.sum()),
            ("clipped", (clipped_N & scored_N).sum()),
            ("return", seen.sum()),
            ("return_squared", seen.square().sum()),
            ("error_squared", (seen - old_N[scored_N]).square().sum()),
            ("error", (seen - old_N[scored_N]).sum()),
        ):
            self._sums[name] = self._sums.get(name, 0.0) + value.item()

    def gradient_norm(self) -> float:
        """The global norm of the gradients, the same number on every rank."""
        norm = gradient_norm(self.model)
        self._norms.append(norm)
        return norm

    def step(self, factor: float) -> None:
        """One optimizer step at this fraction of the peak rate, with the norm that was measured last."""
        clip_gradients(self.model, self._spec.value.max_grad_norm, self._norms[-1])
        set_learning_rate(self.optimizer, self._spec.value.optimizer.lr * factor)
        self.optimizer.step()
        self.discard()

    def discard(self) -> None:
        """Drops the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def metrics(self, num_updates: int) -> dict[str, float]:
        """Of the step, equal on all ranks: `value_loss`, `value_clip_fraction`, `value_grad_norm`, `return` (mean) and
        `explained_variance`, 1 - Var(R - V)/Var(R) with V from before the step."""
        names = ("value_loss", "tokens", "clipped", "return", "return_squared", "error_squared", "error")
        own = torch.tensor([self._sums.get(n, 0.0) for n in names], dtype=torch.float64, device=self._device)
        loss, tokens, clipped, total, squares, error_squares, errors = sum_over_ranks(own).tolist()
        if not tokens:
            return {}
        variance = squares / tokens - (total / tokens) ** 2
        unexplained = error_squares / tokens - (errors / tokens) ** 2
        metrics = {
            "value_loss": loss / num_updates,
            "value_clip_fraction": clipped / tokens,
            "value_grad_norm": sum(self._norms) / len(self._norms),
            "return": total / tokens,
        }
        if variance > 1e-12:
            metrics["explained_variance"] = 1.0 - unexplained / variance
        return metrics

    def _values(self, states: States) -> Tensor:
        values_M, _ = self.model(row=states.row)
        return values_M  # type: ignore[no-any-return]

    def _settle_micro(self, batch: Sequence[TrainingSample], micro: MicroBatch) -> Tensor:
        """[N] advantages before whitening; sets the returns."""
        states = self._states[id(micro)]
        sequences = [batch[i] for i in micro.places]
        lengths_S = np.array([len(s.completion_ids) for s in sequences])
        ends_S = lengths_S.cumsum() - 1
        rewards_SF = np.stack([require_rewards(s, self._spec) for s in sequences])
        totals_S = weighted_rewards(rewards_SF, [reward.weight for reward in self._spec.rewards])
        rewards_N = np.zeros(int(lengths_S.sum()))
        penalty_N = kl_penalties(micro, self._spec)
        if penalty_N is not None:
            rewards_N -= penalty_N.double().cpu().numpy()
        rewards_N[ends_S] += np.nan_to_num(totals_S, nan=0.0)
        before_M = states.before_token_M.cpu().numpy()
        values_M = _given(states.values_M).double().cpu().numpy()
        truncated_S = np.array([s.truncated for s in sequences])
        advantages_N, returns_N = gae(
            rewards_N,
            values_M[before_M],
            np.where(truncated_S, values_M[~before_M], 0.0),
            lengths_S,
            self._spec.value.gae_gamma,
            self._spec.value.gae_lambda,
        )
        states.returns_N = torch.from_numpy(returns_N).to(self._device, torch.float32)
        states.scored_N = torch.from_numpy(np.repeat(~np.isnan(totals_S), lengths_S)).to(self._device)
        return torch.from_numpy(advantages_N).to(self._device, torch.float32)


def _states_of(sequences: Sequence[TrainingSample], device: torch.device) -> States:
    """A row that asks for one state more than there are tokens: as if another token were to be predicted."""
    one = np.zeros(1, np.int32)
    if not sequences:
        sequences = [TrainingSample(-1, one, one)]
    longer = [
        TrainingSample(s.group_id, s.prompt_ids, np.concatenate((s.completion_ids, one))) for s in sequences
    ]
    before_M = np.concatenate([np.arange(len(s.completion_ids)) < len(s.completion_ids) - 1 for s in longer])
    return States(pack_row(longer, device), torch.from_numpy(before_M).to(device))


def _given(values: Tensor | None) -> Tensor:
    if values is None:
        raise ValueError("the value model was not asked about this micro-batch")
    return values

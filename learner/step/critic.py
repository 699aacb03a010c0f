"""The value model of PPO: the values of a batch's states, and its update.

Promise: the value loss is that of the global batch, however it is split over micro-batches and ranks; a dummy
micro-batch takes part in every pass, because under FSDP each pass is a collective. The order inside a step is the same
on all ranks: `with_states` (values of every state, no gradient; advantages and returns follow in
`paceline.learner.step.assign_advantages`), then for each update `accumulate` beside the policy's passes,
`gradient_norm`, `step`.

A completion of T tokens has T + 1 states: before each token, and after the last one. Suffixes: N tokens of a
micro-batch, M its states (N + S), S its sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.learner.advantages import value_losses
from paceline.learner.batch.samples import PackedBatch, TrainingSample, pack_samples
from paceline.learner.collectives import sum_over_ranks
from paceline.learner.model.policy import load_reward_model
from paceline.learner.step.optimizer import (
    clip_gradients,
    gradient_norm,
    make_optimizer,
    set_gradient_sync,
    set_learning_rate,
)
from paceline.learner.step.plan import MicroBatch, States, Update, given
from paceline.spec import RunSpec

ROUNDING = 1e-12
"""If a variance is below this fraction of the mean square, it is only rounding, and the returns count as equal."""


class Critic:
    """Value model and optimizer of one rank. Both are public: checkpoints read them between steps."""

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        assert spec.value_policy is not None
        self.model: PreTrainedModel = load_reward_model(spec.value_policy, device)
        self.optimizer = make_optimizer(self.model, spec.value.optimizer)
        self._sums: dict[str, float] = {}
        self._update_sums: dict[str, float] = {}
        self._norms: list[float] = []
        self._norm = 0.0

    @torch.no_grad()
    def with_states(self, batch: Sequence[TrainingSample], updates: Sequence[Update]) -> list[Update]:
        """Begin a step: return its updates with the value of every state."""
        self._sums, self._norms = {}, []

        def with_states(micro: MicroBatch) -> MicroBatch:
            return replace(micro, states=self._states_of([batch[i] for i in micro.indices]))

        return [replace(u, micro_batches=tuple(map(with_states, u.micro_batches))) for u in updates]

    def accumulate(self, update: Update, micro: MicroBatch, scale: float, *, is_last: bool) -> None:
        """Run one micro-batch forward and backward. The value loss is the mean over the update's scored tokens; only
        its gradients are multiplied by `scale`."""
        states = micro.states
        assert states is not None, "call `with_states` before `accumulate`"
        set_gradient_sync(self.model, self._device, is_last)
        values_N = self._values(states.packed)[states.before_token_M]
        if micro.is_dummy:
            (values_N.sum() * 0.0).backward()  # type: ignore[no-untyped-call]
            return
        old_N = states.values_M[states.before_token_M]
        returns_N, scored_N = given(states.returns_N), given(states.scored_N)
        losses_N, clipped_N = value_losses(values_N, old_N, returns_N, self._spec.value.cliprange)
        losses_N = losses_N.masked_fill(~scored_N, 0.0)
        loss = losses_N.sum() / max(update.num_scored_tokens, 1.0)
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        scored_returns = returns_N[scored_N].double()
        for name, value in (
            ("value_loss", loss),
            ("tokens", scored_N.sum()),
            ("clipped", (clipped_N & scored_N).sum()),
            ("return", scored_returns.sum()),
            ("return_squared", scored_returns.square().sum()),
            ("error_squared", (scored_returns - old_N[scored_N]).square().sum()),
            ("error", (scored_returns - old_N[scored_N]).sum()),
        ):
            self._update_sums[name] = self._update_sums.get(name, 0.0) + value.item()

    def gradient_norm(self) -> float:
        """Return the global norm of the gradients, the same number on every rank."""
        self._norm = gradient_norm(self.model)
        return self._norm

    def step(self, factor: float) -> None:
        """Step the optimizer at `factor` times the peak rate, with gradients clipped by the last measured norm."""
        clip_gradients(self.model, self._spec.value.max_grad_norm, self._norm)
        set_learning_rate(self.optimizer, self._spec.value.optimizer.lr * factor)
        self.optimizer.step()
        self._norms.append(self._norm)
        for name, value in self._update_sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self.discard()

    def discard(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._update_sums = {}

    def metrics(self, num_updates: int) -> dict[str, float]:
        """Return the metrics of the step, equal on all ranks: `value_loss`, `value_clip_fraction`, `value_grad_norm`,
        `return` (mean) and `explained_variance`, 1 - Var(R - V)/Var(R) with V from before the step."""
        names = ("value_loss", "tokens", "clipped", "return", "return_squared", "error_squared", "error")
        sums = torch.tensor([self._sums.get(n, 0.0) for n in names], dtype=torch.float64, device=self._device)
        loss, tokens, clipped, total, squares, error_squares, errors = sum_over_ranks(sums).tolist()
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
        if variance > ROUNDING * squares / tokens:
            metrics["explained_variance"] = 1.0 - unexplained / variance
        return metrics

    def _values(self, packed: PackedBatch) -> Tensor:
        values_M, _ = self.model(packed=packed)
        return values_M  # type: ignore[no-any-return]

    def _states_of(self, sequences: Sequence[TrainingSample]) -> States:
        packed, before_token_M = _pack_states(sequences, self._device, share=self._spec.policy.shares_prompts)
        return States(packed, before_token_M, self._values(packed))


def _pack_states(
    sequences: Sequence[TrainingSample], device: torch.device, *, share: bool
) -> tuple[PackedBatch, Tensor]:
    """Return the packed sequences, each with a further state at its end, and `States.before_token_M`."""
    token = np.zeros(1, np.int32)
    if not sequences:
        sequences = [TrainingSample(-1, token, token)]
    longer = [TrainingSample(s.group_id, s.prompt_ids, np.concatenate((s.completion_ids, token))) for s in sequences]
    before_M = np.concatenate([np.arange(len(s.completion_ids)) < len(s.completion_ids) - 1 for s in longer])
    return pack_samples(longer, device, share=share), torch.from_numpy(before_M).to(device)

"""`offline_grpo`: the policy loss on recorded completions, with advantages from their recorded rewards.

Promise: if a trace has log-probabilities, its behaviour policy μ is the recorded one, so traces that a run exported
have the ratio that they had in the run. For a trace without log-probabilities μ is the starting policy, computed once
before training. Suffixes: N trained tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from paceline.advantages import advantages, group_preset
from paceline.data.examples import read_traces
from paceline.data.traces import Trace
from paceline.learner.batch.encoding import ExampleEncoder, Row
from paceline.learner.batch.samples import PackedBatch, TrainingSample
from paceline.learner.objectives.base import Denominators, LossResult, Objective, TokenArrays, completion_sums
from paceline.learner.objectives.policy import policy_loss
from paceline.spec import RunSpec


class OfflineGrpo(Objective):
    """GRPO without sampling: an example is a prompt with its traces."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self.temperature = spec.policy.generation.temperature
        self.with_entropy_gradient = spec.loss_fn.entropy_bonus > 0

    def samples(
        self, row: Row, number: int, encoder: ExampleEncoder, reference_S: Sequence[float] | None
    ) -> list[TrainingSample]:
        """Return a sample for each trace. The sample of a trace that has only texts has no log μ yet."""
        traces = read_traces(row, self._spec)
        rewards_C = np.array([np.nan if trace.reward is None else trace.reward for trace in traces])
        advantages_C = advantages(rewards_C, group_preset(self._spec.offline_grpo.advantage))

        def sample(trace: Trace) -> TrainingSample:
            if trace.tokens is not None:
                return encoder.recorded(number, trace.tokens)
            of_trace = encoder.of_row({"tools": trace.tools, "finish_reason": trace.finish_reason})
            return of_trace.completion(number, trace.prompt, trace.completion)

        return [
            replace(sample(trace), advantage=float(advantage))
            for trace, advantage in zip(traces, advantages_C, strict=True)
        ]

    def dummy(self) -> list[TrainingSample]:
        zero = np.zeros(1, np.int32)
        return [TrainingSample(-1, zero, zero, np.zeros(1, np.float32), advantage=0.0)]

    def loss(self, tokens: TokenArrays, packed: PackedBatch, counts: Denominators) -> LossResult:
        result = policy_loss(tokens, counts, self._spec.loss_fn)
        return replace(result, sums={**result.sums, **_order_sums(tokens, packed)})

    def metrics(self, sums: dict[str, float], num_updates: int = 1) -> dict[str, float]:
        """Return the metrics with `accuracy`: among pairs of a prompt's completions with different rewards, the
        share whose better completion has the larger Σ_t log π - log μ (equal sums count half)."""
        metrics = super().metrics(sums, num_updates)
        return metrics | ({"accuracy": sums["pairs_won"] / sums["pairs"]} if sums["pairs"] else {})


def _order_sums(tokens: TokenArrays, packed: PackedBatch) -> dict[str, Tensor]:
    """Return a micro-batch's number of pairs, and how many are in the order of their rewards."""
    assert tokens.behaviour_N is not None
    assert tokens.advantages_N is not None
    log_ratio_S = completion_sums((tokens.current_N - tokens.behaviour_N).detach().double(), tokens)
    advantages_S = torch.zeros_like(log_ratio_S)
    advantages_S[tokens.sequence_N] = tokens.advantages_N.double()
    groups_S = torch.tensor(packed.group_ids_S, device=log_ratio_S.device)
    better_SS = (groups_S[:, None] == groups_S) & (advantages_S[:, None] > advantages_S)
    difference_SS = log_ratio_S[:, None] - log_ratio_S
    won_SS = (difference_SS > 0).double() + 0.5 * (difference_SS == 0).double()
    return {"pairs": better_SS.double().sum(), "pairs_won": (better_SS * won_SS).sum()}

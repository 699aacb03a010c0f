"""`rm`: a reward model from pairs: one score for a prompt with a completion. Suffixes: S sequences, P pairs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from paceline.learner.batch.encoding import ExampleEncoder
from paceline.learner.batch.samples import PackedBatch, PreferenceLabel, TrainingSample
from paceline.learner.model.policy import load_reward_model
from paceline.learner.objectives.base import Denominators, LossResult, TokenArrays, completion_result
from paceline.learner.objectives.pairs import PairObjective, pair_sums, pairs_of
from paceline.spec import PolicySection, RunSpec


class RewardModel(PairObjective):
    """Uses the model's output at the only trained token of a sequence as score and reward."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec.data)
        self._centring = spec.rm.centring

    def load_model(self, policy: PolicySection, device: torch.device, seed: int) -> PreTrainedModel:
        return load_reward_model(policy, device)

    def encode(
        self, encoder: ExampleEncoder, number: int, prompt: Any, completion: Any, label: PreferenceLabel
    ) -> TrainingSample:
        """Return the whole text, with the score at its last token."""
        return encoder.scored_text(number, prompt, completion, label)

    def loss(self, tokens: TokenArrays, packed: PackedBatch, counts: Denominators) -> LossResult:
        scores_S, pairs = tokens.current_N, pairs_of(packed, counts.prompts)
        loss = reward_model_loss(
            scores_S[pairs.chosen_P],
            scores_S[pairs.rejected_P],
            pairs.weights_P,
            margins_P=pairs.margins_P,
            centring=self._centring,
        )
        sums = {"tokens": torch.ones_like(scores_S).sum(), **pair_sums(scores_S.detach(), pairs, counts)}
        return completion_result(loss, sums, tokens, scores_S)


def reward_model_loss(
    chosen_P: Tensor, rejected_P: Tensor, weights_P: Tensor, *, margins_P: Tensor | None = None, centring: float = 0.01
) -> Tensor:
    """Return Σ weight · [-log σ(r_c - r_r - margin) + centring·(r_c + r_r)²], with the weights of `Pairs`. Bradley and
    Terry 1952; margins: Touvron et al. 2023 (Llama 2); centring, for comparable scores: Eisenstein et al. 2023."""
    gap_P = chosen_P - rejected_P if margins_P is None else chosen_P - rejected_P - margins_P
    losses_P = -F.logsigmoid(gap_P) + centring * (chosen_P + rejected_P).square()
    return (weights_P * losses_P).sum()

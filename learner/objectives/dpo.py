"""`dpo`: direct preference optimisation and its relatives, from log-ratios to a reference.

Promise: the loss has the value and the gradient of the formula in its docstring. If `weights_P` are counted over the
global batch, the shares of micro-batches add up to the loss of the batch. `log-ratio` is Σ_t log π - log π_ref of a
completion, in nats. Suffixes: S sequences, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.learner.batch.samples import PackedBatch
from paceline.learner.objectives.base import (
    Denominators,
    LossResult,
    TokenArrays,
    completion_lengths,
    completion_result,
    completion_sums,
    reference_sums,
    token_sums,
)
from paceline.learner.objectives.pairs import PairObjective, pair_sums, pairs_of
from paceline.spec import RunSpec

PairLoss = Literal["sigmoid", "conservative", "robust", "hinge", "ipo"]


class Dpo(PairObjective):
    """DPO and its variants; the reward of a completion is β·(log π - log π_ref)."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec.data)
        self._section = spec.dpo

    def loss(self, tokens: TokenArrays, packed: PackedBatch, counts: Denominators) -> LossResult:
        """Return preference_loss_weight · preference_loss + sft_loss_weight · mean over prompts of -Σ_t log π(chosen)."""
        section, pairs = self._section, pairs_of(packed, counts.prompts)
        current_S, lengths_S = completion_sums(tokens.current_N, tokens), completion_lengths(tokens)
        log_ratios_S = current_S - reference_sums(tokens, packed)
        given = PairLogRatios(
            log_ratios_S[pairs.chosen_P],
            log_ratios_S[pairs.rejected_P],
            lengths_S[pairs.chosen_P],
            lengths_S[pairs.rejected_P],
            pairs.weights_P,
        )
        preference = preference_loss(
            given,
            section.preference_loss,
            beta=section.reference_policy_kl_penalty,
            label_smoothing=section.label_smoothing,
            average=section.preference_average_log_probs,
        )
        loss = section.preference_loss_weight * preference
        sums = {"preference_loss": preference.detach().double()}
        if section.sft_loss_weight:
            nll_S = -current_S / lengths_S if section.sft_average_log_probs else -current_S
            likelihood = (pairs.weights_P * nll_S[pairs.chosen_P]).sum()
            loss = loss + section.sft_loss_weight * likelihood
            sums["sft_loss"] = likelihood.detach().double()
        rewards_S = section.reference_policy_kl_penalty * log_ratios_S.detach()
        return completion_result(
            loss, {**sums, **token_sums(tokens), **pair_sums(rewards_S, pairs, counts)}, tokens, log_ratios_S
        )


@dataclass(frozen=True)
class PairLogRatios:
    """Log-ratios of P pairs. A prompt with K rejected completions has K pairs, each of weight 1/K."""

    chosen_P: Tensor
    """[P] log π - log π_ref of the chosen completion, summed over its tokens; with gradient."""
    rejected_P: Tensor
    chosen_lengths_P: Tensor
    """[P] number of tokens, as float; only `ipo` and `average` read it."""
    rejected_lengths_P: Tensor
    weights_P: Tensor
    """[P] share of each pair in the batch's mean; the shares add up to 1 over the global batch."""


def preference_loss(
    pairs: PairLogRatios, kind: PairLoss, *, beta: float, label_smoothing: float = 0.0, average: bool = False
) -> Tensor:
    """Return Σ weight · loss(d), d = chosen - rejected log-ratio; `average` divides each log-ratio by its length first.

    - `sigmoid`: -log σ(βd) (DPO, Rafailov et al. 2023).
    - `conservative`: -(1-ε)·log σ(βd) - ε·log σ(-βd), ε the chance of a flipped label (Mitchell 2023).
    - `robust`: [-(1-ε)·log σ(βd) + ε·log σ(-βd)] / (1-2ε), unbiased under flips (Chowdhury et al. 2024).
    - `hinge`: max(0, 1 - βd) (SLiC, Zhao et al. 2023).
    - `ipo`: (d̄ - 1/2β)², d̄ always from per-token means (Azar et al. 2023; per token as in TRL, with its authors).

    Raises ValueError if label_smoothing is outside [0, 0.5), or if it is given for a loss that does not use it (TRL
    ignores it then).
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be in [0, 0.5)")
    if label_smoothing and kind not in ("conservative", "robust"):
        raise ValueError(f"label_smoothing {label_smoothing} has no meaning for {kind!r}: use conservative or robust")
    chosen_P, rejected_P = pairs.chosen_P, pairs.rejected_P
    if average or kind == "ipo":
        chosen_P = chosen_P / pairs.chosen_lengths_P.clamp(min=1)
        rejected_P = rejected_P / pairs.rejected_lengths_P.clamp(min=1)
    margin_P = beta * (chosen_P - rejected_P)
    won_P, lost_P = F.logsigmoid(margin_P), F.logsigmoid(-margin_P)
    match kind:
        case "sigmoid":
            losses_P = -won_P
        case "conservative":
            losses_P = -(1 - label_smoothing) * won_P - label_smoothing * lost_P
        case "robust":
            losses_P = (-(1 - label_smoothing) * won_P + label_smoothing * lost_P) / (1 - 2 * label_smoothing)
        case "hinge":
            losses_P = torch.relu(1 - margin_P)
        case "ipo":
            losses_P = (chosen_P - rejected_P - 1 / (2 * beta)).square()
        case _:
            raise ValueError(f"unknown preference loss {kind!r}")
    return (pairs.weights_P * losses_P).sum()

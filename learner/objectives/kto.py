"""`kto`: Kahneman-Tversky optimisation of single completions, good or bad. Suffix: S sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.data.example_rows import read_labeled_completion
from paceline.learner.batch.encoding import ExampleEncoder, Row
from paceline.learner.batch.samples import PackedBatch, PreferenceLabel, TrainingSample
from paceline.learner.objectives.base import (
    Denominators,
    LossResult,
    Objective,
    TokenArrays,
    completion_result,
    completion_sums,
    labeled_dummies,
    reference_sums,
    token_sums,
)
from paceline.spec import RunSpec


class Kto(Objective):
    """KTO; the reward of a completion is β·(log π - log π_ref). The KL is measured on completions of other prompts."""

    keeps_prompts_whole = True
    measures_mismatched = True

    def __init__(self, spec: RunSpec) -> None:
        self._data = spec.data
        self._section = spec.kto

    def samples(
        self, row: Row, number: int, encoder: ExampleEncoder, reference_S: Sequence[float] | None
    ) -> list[TrainingSample]:
        prompt, completion, desirable = read_labeled_completion(row, self._data)
        label = PreferenceLabel(desirable, reference_logprob=reference_S[0] if reference_S else None)
        return [encoder.of_row(row).completion(number, prompt, completion, label)]

    def mismatched_sample(
        self, row: Row, other: Row, number: int, encoder: ExampleEncoder, reference_S: Sequence[float] | None
    ) -> TrainingSample:
        prompt, _, desirable = read_labeled_completion(row, self._data)
        completion = read_labeled_completion(other, self._data).completion
        reference_sum = reference_S[0] if reference_S else None
        label = PreferenceLabel(desirable, mismatched=True, reference_logprob=reference_sum)
        return encoder.of_row(row).cut_completion(number, prompt, completion, label)

    def dummy(self) -> list[TrainingSample]:
        return labeled_dummies()

    def loss(self, tokens: TokenArrays, packed: PackedBatch, counts: Denominators) -> LossResult:
        section = self._section
        log_ratios_S = completion_sums(tokens.current_N, tokens) - reference_sums(tokens, packed)
        good_S = torch.tensor([label.good for label in packed.labels_S], device=log_ratios_S.device)
        batch_kl = tokens.batch_kl or 0.0
        loss = kto_loss(
            log_ratios_S,
            good_S,
            batch_kl,
            counts.sequences,
            beta=section.reference_policy_kl_penalty,
            desirable_weight=section.desirable_weight,
            undesirable_weight=section.undesirable_weight,
        )
        rewards_S = section.reference_policy_kl_penalty * log_ratios_S.detach().double()
        ahead_S = torch.where(good_S, 1.0, -1.0) * (log_ratios_S.detach() - max(batch_kl, 0.0))
        sums = {
            **token_sums(tokens),
            "labels": torch.ones_like(rewards_S).sum(),
            "labels_right": ((ahead_S > 0).double() + 0.5 * (ahead_S == 0).double()).sum(),
            "good": good_S.double().sum(),
            "good_reward": rewards_S[good_S].sum(),
            "bad_reward": rewards_S[~good_S].sum(),
        }
        return completion_result(loss, sums, tokens, log_ratios_S)

    def metrics(self, sums: dict[str, float], num_updates: int = 1) -> dict[str, float]:
        """Return the metrics with `batch_kl`; `accuracy`: the share of completions on the correct side of z (exactly z
        counts half); `chosen_reward`: the mean reward of good completions; `rejected_reward`: the mean reward of bad
        completions; `margin`: the difference of these means."""
        metrics = super().metrics(sums, num_updates)
        metrics |= {"batch_kl": sums["batch_kl"]} if "batch_kl" in sums else {}
        if sums["labels"]:
            good, bad = sums["good"], sums["labels"] - sums["good"]
            metrics["accuracy"] = sums["labels_right"] / sums["labels"]
            metrics |= {"chosen_reward": sums["good_reward"] / good} if good else {}
            metrics |= {"rejected_reward": sums["bad_reward"] / bad} if bad else {}
            if good and bad:
                metrics["margin"] = metrics["chosen_reward"] - metrics["rejected_reward"]
        return metrics


def kto_loss(
    log_ratios_S: Tensor,
    desirable_S: Tensor,
    batch_kl: float,
    num_sequences: int,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Return the global batch's mean of weight · (1 - σ(±β·(log-ratio - z))), with + for a desirable completion and -
    for an undesirable one (Ethayarajh et al. 2024). `batch_kl` is the mean log-ratio of mismatched prompts and
    completions over the global batch; z = max(0, batch_kl) is a constant of the loss. `num_sequences` are the
    completions in the global batch."""
    sign_S = torch.where(desirable_S, torch.ones_like(log_ratios_S), -torch.ones_like(log_ratios_S))
    weight_S = torch.where(
        desirable_S, torch.full_like(log_ratios_S, desirable_weight), torch.full_like(log_ratios_S, undesirable_weight)
    )
    # 1 - σ(x) = σ(-x), without the cancellation.
    losses_S = torch.sigmoid(-beta * sign_S * (log_ratios_S - max(batch_kl, 0.0)))
    return (weight_S * losses_S).sum() / num_sequences

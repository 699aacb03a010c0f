"""Pairs of a chosen and a rejected completion of one prompt: `dpo`, `orpo` and `rm`.

Promise: a prompt counts once, however many rejected completions it has; all denominators are of the global batch, so
shares add up however the batch was split (a prompt's sequences are in one micro-batch). Suffixes: N trained tokens, S
sequences, P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.data.example_rows import read_preference
from paceline.learner.batch.encoding import ExampleEncoder, Row
from paceline.learner.batch.samples import PackedBatch, PreferenceLabel, TrainingSample
from paceline.learner.objectives.base import Denominators, Objective, labeled_dummies
from paceline.spec import DataSection


class PairObjective(Objective):
    """An objective on pairs: a row has the chosen completion, then the rejected ones."""

    keeps_prompts_whole = True

    def __init__(self, data: DataSection) -> None:
        self._data = data

    def samples(
        self, row: Row, number: int, encoder: ExampleEncoder, reference_S: Sequence[float] | None
    ) -> list[TrainingSample]:
        prompt, chosen, rejected, margin = read_preference(row, self._data)
        labels = [(chosen, PreferenceLabel(True, margin)), *((each, PreferenceLabel(False)) for each in rejected)]
        sums: Sequence[float | None] = reference_S or [None] * len(labels)
        encoder = encoder.of_row(row)
        return [
            self.encode(encoder, number, prompt, completion, label._replace(reference_logprob=reference_sum))
            for (completion, label), reference_sum in zip(labels, sums, strict=True)
        ]

    def encode(
        self, encoder: ExampleEncoder, number: int, prompt: Any, completion: Any, label: PreferenceLabel
    ) -> TrainingSample:
        """Return the sample of one completion."""
        return encoder.completion(number, prompt, completion, label)

    def dummy(self) -> list[TrainingSample]:
        return labeled_dummies()

    def metrics(self, sums: dict[str, float], num_updates: int = 1) -> dict[str, float]:
        """Return the metrics with `preference_loss` and `sft_loss`, the parts of the loss; `accuracy`: the share of
        pairs whose chosen completion has the higher reward (equal rewards count half); `margin`: mean difference of
        rewards; `chosen_reward`, `rejected_reward`: their means."""
        metrics = super().metrics(sums, num_updates)
        parts = ("preference_loss", "sft_loss")
        metrics |= {name: sums[name] / num_updates for name in parts if name in sums}
        if sums["pairs"]:
            metrics |= {
                "accuracy": sums["pairs_won"] / sums["pairs"],
                "margin": (sums["chosen_reward"] - sums["rejected_reward"]) / sums["pairs"],
                "chosen_reward": sums["chosen_reward"] / sums["pairs"],
                "rejected_reward": sums["rejected_reward"] / sums["pairs"],
            }
        return metrics


@dataclass(frozen=True)
class Pairs:
    """The pairs of a micro-batch, as indices of its sequences."""

    chosen_P: Tensor
    rejected_P: Tensor
    weights_P: Tensor
    """1 / (prompts of the global batch · rejected completions of the prompt)."""
    margins_P: Tensor


def pairs_of(packed: PackedBatch, num_prompts: int) -> Pairs:
    """Return each rejected completion with its prompt's chosen one. Raises ValueError for a prompt that lacks either."""
    chosen: dict[int, int] = {}
    rejected: dict[int, list[int]] = {}
    for index, (prompt, label) in enumerate(zip(packed.group_ids_S, packed.labels_S, strict=True)):
        if label.good:
            chosen[prompt] = index
        else:
            rejected.setdefault(prompt, []).append(index)
    if chosen.keys() != rejected.keys():
        broken = sorted(chosen.keys() ^ rejected.keys())
        raise ValueError(f"examples {broken} have only chosen or only rejected completions in a micro-batch")
    pairs = [(prompt, index) for prompt, worse in rejected.items() for index in worse]

    def integers(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=packed.targets_N.device)

    def floats(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=packed.targets_N.device)

    return Pairs(
        integers([chosen[prompt] for prompt, _ in pairs]),
        integers([index for _, index in pairs]),
        floats([1 / (num_prompts * len(rejected[prompt])) for prompt, _ in pairs]),
        floats([packed.labels_S[chosen[prompt]].margin for prompt, _ in pairs]),
    )


def pair_sums(rewards_S: Tensor, pairs: Pairs, counts: Denominators) -> dict[str, Tensor]:
    """Return the sums that `PairObjective.metrics` reads. They count prompts: a prompt's pairs share a weight of 1."""
    weights_P = pairs.weights_P.double() * counts.prompts
    chosen_P, rejected_P = rewards_S[pairs.chosen_P].double(), rewards_S[pairs.rejected_P].double()
    won_P = (chosen_P > rejected_P).double() + 0.5 * (chosen_P == rejected_P).double()
    return {
        "pairs": weights_P.sum(),
        "pairs_won": (weights_P * won_P).sum(),
        "chosen_reward": (weights_P * chosen_P).sum(),
        "rejected_reward": (weights_P * rejected_P).sum(),
    }

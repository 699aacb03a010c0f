"""`sft`: maximum likelihood of a data set's completions."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.data.example_rows import read_demonstration
from paceline.learner.batch.encoding import ExampleEncoder, Row
from paceline.learner.batch.samples import PackedBatch, TrainingSample
from paceline.learner.objectives.base import (
    Denominators,
    LossResult,
    Objective,
    TokenArrays,
    dummy_sample,
    reduced,
    token_sums,
)
from paceline.spec import RunSpec


class Sft(Objective):
    """Trains one sample for each row: the completion, or the assistant's messages of a conversation."""

    def __init__(self, spec: RunSpec) -> None:
        self._data = spec.data
        self._loss_mask = spec.sft.loss_mask

    def samples(
        self, row: Row, number: int, encoder: ExampleEncoder, reference_S: Sequence[float] | None
    ) -> list[TrainingSample]:
        example, encoder = read_demonstration(row, self._data), encoder.of_row(row)
        if example.prompt is None:
            return [encoder.text(number, example.completion)]
        if self._loss_mask == "assistant":
            return [encoder.conversation(number, [*example.prompt, *example.completion])]
        return [encoder.completion(number, example.prompt, example.completion)]

    def dummy(self) -> list[TrainingSample]:
        return [dummy_sample()]

    def loss(self, tokens: TokenArrays, packed: PackedBatch, counts: Denominators) -> LossResult:
        return sft_loss(tokens, counts)


def sft_loss(tokens: TokenArrays, denominators: Denominators) -> LossResult:
    """Return the negative log-likelihood of the completions, as a mean over the tokens of the global batch: loss = -Σ_t
    log π_t / tokens of the batch (maximum likelihood, as in every language model since Bengio et al. 2003)."""
    return reduced(-tokens.current_N, token_sums(tokens), tokens, denominators, "dapo")

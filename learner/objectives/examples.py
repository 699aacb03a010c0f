"""Batches from a data set, for the algorithms that do not sample. The same step always gets the same examples.

The order is a permutation of the rows in every epoch and depends only on the seed. Rank r of w takes every w-th example
of the step, so any number of ranks trains the same batch. An example is never split: a prompt with its chosen and
rejected completions is on one rank, its sequences share a group id, and the chosen one comes first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from paceline.data.examples import open_examples
from paceline.data.prompts import PromptSource
from paceline.errors import InvalidInput
from paceline.groups import FloatArray
from paceline.learner.batch.encoding import ExampleEncoder
from paceline.learner.batch.samples import TrainingSample
from paceline.learner.collectives import max_over_ranks, world_size
from paceline.learner.objectives.base import Objective
from paceline.spec import RunSpec


class RowPair(NamedTuple):
    """The rows of a prompt and of the completions after it; the two rows differ only if KTO measures its KL on the
    pair."""

    prompt: int
    completions: int


class ExampleSource:
    """The examples of each step of a run; with `validation`, the run's held-out examples. `maker` is the run's
    objective."""

    def __init__(self, spec: RunSpec, tokenizer: Any, maker: Objective, *, validation: bool = False):
        assert spec.examples is not None, "the algorithm samples, so the run has no examples"
        self._section = spec.examples
        self._maker = maker
        self._encoder = ExampleEncoder(spec, tokenizer)
        source = spec.data.source(validation=validation)
        self._name = source.name
        self._rows = open_examples(spec, validation=validation)
        shuffled = spec.data.shuffle and not validation
        self._order = PromptSource(self._rows, spec.data, spec.seed, shuffle=shuffled, validation=validation)
        self._validation = validation
        self._reference: dict[RowPair, list[float]] | None = None
        self._behaviour: dict[int, FloatArray] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def of_step(self, step: int, rank: int, world_size: int) -> list[TrainingSample]:
        """Return this rank's examples of a step. Raises InvalidInput for an example longer than the model allows."""
        first = step * self._count
        return self._examples([first + i for i in range(rank, self._count, world_size)])

    def held_out(self, rank: int, world_size: int) -> list[TrainingSample]:
        """Return this rank's share of a measurement's examples. Raises InvalidInput for an example that is too long."""
        return self._examples(list(range(rank, self._count, world_size)))

    def rows_used(self) -> list[int]:
        """Return the rows that the run (or a measurement) will use, ascending."""
        return self._order.rows(self._drawn)

    def row_pairs(self) -> list[RowPair]:
        """Return the pairs whose completions the run (or a measurement) compares with the reference, ascending."""
        pairs = {RowPair(row, row) for row in self.rows_used()}
        if self._maker.measures_mismatched:
            index = self._order.index
            pairs |= {RowPair(index(c), index(self._other(c))) for c in range(self._drawn)}
        return sorted(pairs)

    def of_row(self, row: int) -> list[TrainingSample]:
        """Return the samples of a row. Raises InvalidInput for an example longer than the model allows."""
        return self.of_pair(RowPair(row, row), row)

    def of_pair(self, pair: RowPair, number: int) -> list[TrainingSample]:
        """Return the samples of `pair`, with `number` as group id. Raises InvalidInput for an example that is too
        long."""
        try:
            if pair.completions != pair.prompt:
                return [self._mismatched(pair, number)]
            row, sums = self._rows[pair.prompt], self._reference_sums(pair)
            samples = self._maker.samples(row, number, self._encoder, sums)
            return self._with_behaviour(pair.prompt, samples)
        except InvalidInput as error:
            raise InvalidInput(f"row {pair.prompt} of {self._name}: {error}") from None

    def set_reference(self, logprobs: dict[RowPair, list[float]]) -> None:
        """Set Σ_t log π_ref of each completion, in the order of `of_pair`; samples that are made afterwards have it."""
        self._reference = logprobs

    def set_behaviour(self, logprobs: dict[int, FloatArray]) -> None:
        """Set log μ of the samples that have no log μ, for all later results of `of_row`. `logprobs` maps a row to the
        values of all such samples of the row, concatenated."""
        self._behaviour = logprobs

    def _with_behaviour(self, row: int, samples: list[TrainingSample]) -> list[TrainingSample]:
        logprobs = self._behaviour.get(row)
        if logprobs is None:
            return samples
        completed, start = [], 0
        for sample in samples:
            if sample.behaviour_logprobs_T is None:
                end = start + len(sample.completion_ids)
                sample, start = replace(sample, behaviour_logprobs_T=logprobs[start:end]), end
            completed.append(sample)
        return completed

    @property
    def _count(self) -> int:
        if self._validation:
            return min(len(self), self._section.max_val_samples)
        return self._section.num_examples_per_step

    @property
    def _drawn(self) -> int:
        return self._count * (1 if self._validation else self._section.max_num_steps)

    def _other(self, cursor: int) -> int:
        """Return the example of the same batch whose completion KTO joins to the prompt of `cursor` to measure the KL."""
        first = cursor - cursor % self._count
        return first + (cursor + 1 - first) % self._count

    def _examples(self, cursors: list[int]) -> list[TrainingSample]:
        sequences: list[TrainingSample] = []
        for cursor in cursors:
            row = self._order.index(cursor)
            sequences += self.of_pair(RowPair(row, row), cursor)
            if self._maker.measures_mismatched:
                other = self._order.index(self._other(cursor))
                sequences.append(self._mismatched(RowPair(row, other), cursor))
        return sequences

    def _mismatched(self, pair: RowPair, number: int) -> TrainingSample:
        row, other = self._rows[pair.prompt], self._rows[pair.completions]
        return self._maker.mismatched_sample(row, other, number, self._encoder, self._reference_sums(pair))

    def _reference_sums(self, pair: RowPair) -> list[float] | None:
        return None if self._reference is None else self._reference[pair]


def check_rows(source: ExampleSource, device: torch.device, rank: int) -> None:
    """Before the first step, check every row that the run will use: a row that cannot be trained would end the run
    later, on one rank, while the other ranks wait in a collective. A collective call: each rank checks every w-th row.
    Raises InvalidInput, on every rank, for a row that is too long or that the chat template refuses."""
    rows = source.rows_used()
    bad = next((i for i in range(rank, len(rows), world_size()) if _is_bad(source, rows[i])), len(rows))
    first = len(rows) - int(max_over_ranks(torch.tensor([len(rows) - bad], device=device)).item())
    if first < len(rows):
        source.of_row(rows[first])
        raise InvalidInput(f"another rank cannot train row {rows[first]}; that rank reports why")


def _is_bad(source: ExampleSource, row: int) -> bool:
    try:
        source.of_row(row)
    except InvalidInput:
        return True
    return False

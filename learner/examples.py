"""Batches from a data set, for the algorithms that do not sample. The same step always gets the same examples.

The order is a permutation of the rows in every epoch, a function of the seed alone; rank r of w takes every w-th
example of the step, so that any number of ranks trains the same batch. An example is never split: a prompt with its
chosen and rejected completions is on one rank, its sequences share a group id, the chosen one comes first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from learner.batch import TrainSequence, Verdict
from paceline.data import PromptSource, open_rows
from paceline.errors import InvalidInput
from paceline.example_rows import check_example, read_demonstration, read_preference, read_verdict
from paceline.prompts import encode_conversation, encode_exchange, encode_for_scoring
from paceline.spec import RunSpec


class ExampleSource:
    """Examples of a run, by step, or with `validation` the held-out ones."""

    def __init__(self, spec: RunSpec, tokenizer: Any, *, validation: bool = False):
        assert spec.examples is not None, "the spec samples; it has no examples"
        self._spec = spec
        self._section = spec.examples
        self._tokenizer = tokenizer
        name, split, field = (
            (spec.data.validation, spec.data.validation_split, "data.validation")
            if validation
            else (spec.data.train, spec.data.train_split, "data.train")
        )
        assert name is not None, "the spec refuses validation without data.validation"
        self._name = name
        self._rows = open_rows(name, split, field, check_example(spec))
        shuffled = spec.data.shuffle and not validation
        self._order = PromptSource(self._rows, spec.data, spec.seed, shuffle=shuffled)
        self._validation = validation
        self._reference: dict[int, list[float]] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def part(self, step: int, rank: int, world_size: int) -> list[TrainSequence]:
        """This rank's examples of a step. Raises InvalidInput for one that is longer than the model allows."""
        count = self._section.num_examples_per_step
        first = step * count
        return self._sequences([first + i for i in range(rank, count, world_size)], first, count)

    def held_out(self, rank: int, world_size: int) -> list[TrainSequence]:
        """This rank's share of the examples that one measurement uses. Raises InvalidInput as `part`."""
        count = min(len(self), self._section.max_val_samples)
        return self._sequences(list(range(rank, count, world_size)), 0, count)

    def rows_used(self) -> list[int]:
        """Rows that the run (or a measurement) will see, ascending."""
        if self._validation:
            return list(range(min(len(self), self._section.max_val_samples)))
        drawn = self._section.max_num_steps * self._section.num_examples_per_step
        return sorted({self._order.index(cursor) for cursor in range(min(drawn, len(self)))})

    def of_row(self, row: int) -> list[TrainSequence]:
        """The pairs of a row, with its number as their id. Raises InvalidInput as `part`."""
        try:
            return self._pairs_of(row, row)
        except InvalidInput as error:
            raise InvalidInput(f"row {row} of {self._name}: {error}") from None

    def know_reference(self, logprobs: dict[int, list[float]]) -> None:
        """Σ_t log π_ref of each row's completions, in the order of `of_row`; sequences carry them from now on."""
        self._reference = logprobs

    def _sequences(self, cursors: list[int], first: int, count: int) -> list[TrainSequence]:
        """The sequences of some examples of the batch [first, first + count)."""
        sequences: list[TrainSequence] = []
        for cursor in cursors:
            try:
                match self._spec.algorithm:
                    case "sft":
                        sequences.append(self._demonstration(cursor))
                    case "kto":
                        sequences += self._judged(cursor, first + (cursor + 1 - first) % count)
                    case _:
                        sequences += self._pairs(cursor)
            except InvalidInput as error:
                raise InvalidInput(f"row {self._order.index(cursor)} of {self._name}: {error}") from None
        return sequences

    def _row(self, cursor: int) -> dict[str, Any]:
        return self._rows[self._order.index(cursor)]

    def _demonstration(self, cursor: int) -> TrainSequence:
        example = read_demonstration(self._row(cursor), self._spec.data)
        if self._spec.sft.loss_mask == "assistant":
            ids, mask = encode_conversation(self._tokenizer, [*example.prompt, *example.completion])
            first = max(int(mask.argmax()), 1)  # the first token of a text is never predicted
            return TrainSequence(cursor, ids[:first], self._fitting(ids)[first:], trained_T=mask[first:])
        return self._sequence(cursor, example.prompt, example.completion, None)

    def _pairs(self, cursor: int) -> list[TrainSequence]:
        return self._pairs_of(self._order.index(cursor), cursor)

    def _pairs_of(self, row: int, number: int) -> list[TrainSequence]:
        prompt, chosen, rejected, margin = read_preference(self._rows[row], self._spec.data)
        verdicts = [(chosen, Verdict(True, margin)), *((worse, Verdict(False)) for worse in rejected)]
        known = self._reference[row] if self._reference is not None else [None] * len(verdicts)
        return [
            self._sequence(number, prompt, completion, verdict._replace(reference_logprob=logprob))
            for (completion, verdict), logprob in zip(verdicts, known, strict=True)
        ]

    def _judged(self, cursor: int, other: int) -> list[TrainSequence]:
        """A good or bad completion, and another example's after the same prompt, to measure the KL on."""
        prompt, completion, desirable = read_verdict(self._row(cursor), self._spec.data)
        foreign = read_verdict(self._row(other), self._spec.data).completion
        return [
            self._sequence(cursor, prompt, completion, Verdict(desirable)),
            self._sequence(cursor, prompt, foreign, Verdict(desirable, mismatched=True)),
        ]

    def _sequence(self, cursor: int, prompt: Any, completion: Any, verdict: Verdict | None) -> TrainSequence:
        template = self._spec.data.apply_chat_template
        if self._spec.algorithm == "rm":
            # The whole text is read, and one thing is asked at its last token: the score.
            ids = self._fitting(encode_for_scoring(self._tokenizer, prompt, completion, template))
            return TrainSequence(cursor, ids, np.zeros(1, np.int32), verdict=verdict)
        prompt_ids, completion_ids = encode_exchange(self._tokenizer, prompt, completion, template)
        self._fitting(np.concatenate((prompt_ids, completion_ids)))
        return TrainSequence(cursor, prompt_ids, completion_ids, verdict=verdict)

    def _fitting(self, ids: np.ndarray) -> np.ndarray:
        limit = self._spec.policy.max_total_sequence_length
        if len(ids) > limit:
            raise InvalidInput(
                f"it has {len(ids)} tokens, policy.max_total_sequence_length is {limit}; raise that, or remove the row"
            )
        return ids

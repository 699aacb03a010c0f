"""Batches from a data set, for the algorithms that do not sample. The same step always gets the same examples.

The order is a permutation of the rows in every epoch, a function of the seed alone; rank r of w takes every w-th
example of the step, so that any number of ranks trains the same batch. An example is never split: a prompt with its
chosen and rejected completions is on one rank, its sequences share a group id, the chosen one comes first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from learner.batch.samples import TrainingSample, Verdict
from paceline.data.examples import check_example, read_demonstration, read_preference, read_verdict
from paceline.data.rows import PromptSource, open_rows
from paceline.data.tokens import encode_conversation, encode_exchange, encode_for_scoring
from paceline.errors import InvalidInput
from paceline.spec import RunSpec


class Asked(NamedTuple):
    """Completions after a prompt, by the rows that they are in. They differ where KTO measures its KL."""

    prompt: int
    completions: int


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
        self._reference: dict[Asked, list[float]] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def part(self, step: int, rank: int, world_size: int) -> list[TrainingSample]:
        """This rank's examples of a step. Raises InvalidInput for one that is longer than the model allows."""
        first = step * self._count
        return self._examples([first + i for i in range(rank, self._count, world_size)])

    def held_out(self, rank: int, world_size: int) -> list[TrainingSample]:
        """This rank's share of the examples that one measurement uses. Raises InvalidInput as `part`."""
        return self._examples(list(range(rank, self._count, world_size)))

    def rows_used(self) -> list[int]:
        """Rows that the run (or a measurement) will see, ascending."""
        return sorted({self._order.index(cursor) for cursor in range(min(self._drawn, len(self)))})

    def asked(self) -> list[Asked]:
        """What the run (or a measurement) will ask the reference about, ascending, each once."""
        own = {Asked(row, row) for row in self.rows_used()}
        if self._spec.algorithm == "kto":
            own |= {
                Asked(self._order.index(c), self._order.index(self._other(c))) for c in range(self._drawn)
            }
        return sorted(own)

    def of_row(self, row: int) -> list[TrainingSample]:
        """What a row trains. Raises InvalidInput as `part`."""
        return self.about(Asked(row, row), row)

    def about(self, asked: Asked, number: int) -> list[TrainingSample]:
        """The sequences of `asked`, with `number` as their id. Raises InvalidInput as `part`."""
        try:
            if asked.completions != asked.prompt:
                return [self._foreign(asked, number)]
            match self._spec.algorithm:
                case "sft":
                    return [self._demonstration(asked.prompt, number)]
                case "kto":
                    return [self._judged(asked.prompt, number)]
                case _:
                    return self._pairs(asked.prompt, number)
        except InvalidInput as error:
            raise InvalidInput(f"row {asked.prompt} of {self._name}: {error}") from None

    def know_reference(self, logprobs: dict[Asked, list[float]]) -> None:
        """Σ_t log π_ref of each completion, in the order of `about`; sequences carry them from now on."""
        self._reference = logprobs

    @property
    def _count(self) -> int:
        """Examples of a step, or of a measurement."""
        if self._validation:
            return min(len(self), self._section.max_val_samples)
        return self._section.num_examples_per_step

    @property
    def _drawn(self) -> int:
        """Examples of the whole run, or of a measurement."""
        return self._count * (1 if self._validation else self._section.max_num_steps)

    def _other(self, cursor: int) -> int:
        """The example of the same batch whose completion KTO's KL is measured on, after this one's prompt."""
        first = cursor - cursor % self._count
        return first + (cursor + 1 - first) % self._count

    def _examples(self, cursors: list[int]) -> list[TrainingSample]:
        sequences: list[TrainingSample] = []
        for cursor in cursors:
            row = self._order.index(cursor)
            sequences += self.about(Asked(row, row), cursor)
            if self._spec.algorithm == "kto":
                sequences.append(self._foreign(Asked(row, self._order.index(self._other(cursor))), cursor))
        return sequences

    def _demonstration(self, row: int, number: int) -> TrainingSample:
        example = read_demonstration(self._rows[row], self._spec.data)
        if self._spec.sft.loss_mask == "assistant":
            ids, mask = encode_conversation(self._tokenizer, [*example.prompt, *example.completion])
            first = max(int(mask.argmax()), 1)  # the first token of a text is never predicted
            return TrainingSample(number, ids[:first], self._fitting(ids)[first:], trained_T=mask[first:])
        return self._sequence(number, example.prompt, example.completion, None)

    def _pairs(self, row: int, number: int) -> list[TrainingSample]:
        prompt, chosen, rejected, margin = read_preference(self._rows[row], self._spec.data)
        verdicts = [(chosen, Verdict(True, margin)), *((worse, Verdict(False)) for worse in rejected)]
        known = self._known(Asked(row, row), len(verdicts))
        return [
            self._sequence(number, prompt, completion, verdict._replace(reference_logprob=logprob))
            for (completion, verdict), logprob in zip(verdicts, known, strict=True)
        ]

    def _judged(self, row: int, number: int) -> TrainingSample:
        """A good or bad completion."""
        prompt, completion, desirable = read_verdict(self._rows[row], self._spec.data)
        (known,) = self._known(Asked(row, row), 1)
        return self._sequence(number, prompt, completion, Verdict(desirable, reference_logprob=known))

    def _foreign(self, asked: Asked, number: int) -> TrainingSample:
        """Another example's completion after this one's prompt, cut off where it would not fit: nothing trains on it."""
        prompt, _, desirable = read_verdict(self._rows[asked.prompt], self._spec.data)
        foreign = read_verdict(self._rows[asked.completions], self._spec.data).completion
        (known,) = self._known(asked, 1)
        prompt_ids, ids = encode_exchange(
            self._tokenizer, prompt, foreign, self._spec.data.apply_chat_template
        )
        room = max(self._spec.policy.max_total_sequence_length - len(prompt_ids), 0)
        verdict = Verdict(desirable, mismatched=True, reference_logprob=known)
        return TrainingSample(number, prompt_ids, ids[:room], verdict=verdict)

    def _known(self, asked: Asked, count: int) -> list[float | None]:
        """What the reference said of the completions of `asked`; Nones where it is asked in the step."""
        return [None] * count if self._reference is None else list(self._reference[asked])

    def _sequence(self, number: int, prompt: Any, completion: Any, verdict: Verdict | None) -> TrainingSample:
        template = self._spec.data.apply_chat_template
        if self._spec.algorithm == "rm":
            # The whole text is read, and one thing is asked at its last token: the score.
            ids = self._fitting(encode_for_scoring(self._tokenizer, prompt, completion, template))
            return TrainingSample(number, ids, np.zeros(1, np.int32), verdict=verdict)
        prompt_ids, completion_ids = encode_exchange(self._tokenizer, prompt, completion, template)
        self._fitting(np.concatenate((prompt_ids, completion_ids)))
        return TrainingSample(number, prompt_ids, completion_ids, verdict=verdict)

    def _fitting(self, ids: np.ndarray) -> np.ndarray:
        limit = self._spec.policy.max_total_sequence_length
        if len(ids) > limit:
            raise InvalidInput(
                f"it has {len(ids)} tokens, policy.max_total_sequence_length is {limit}; raise that, or remove the row"
            )
        return ids

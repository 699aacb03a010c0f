"""Supervised batches from a data set: `algorithm: sft`. The same step always gets the same examples.

The order is a permutation of the rows in every epoch, a function of the seed alone; rank r of w takes every w-th
example of the step, so that any number of ranks trains the same batch.
"""

from __future__ import annotations

from typing import Any

from learner.batch import TrainSequence, sequences_from_examples
from paceline.data import PromptSource, open_rows
from paceline.errors import InvalidInput
from paceline.prompts import encode_completion, encode_prompt
from paceline.spec import RunSpec


class ExampleSource:
    """Examples of a run, by step."""

    def __init__(self, spec: RunSpec, tokenizer: Any):
        self._spec = spec
        self._tokenizer = tokenizer
        rows = open_rows(spec.data.train, spec.data.train_split)
        self._source = PromptSource(rows, spec.data, spec.seed, shuffle=spec.data.shuffle)

    def part(self, step: int, rank: int, world_size: int) -> list[TrainSequence]:
        """This rank's examples of a step. Raises InvalidInput for one that is longer than the model allows."""
        first, count = step * self._spec.sft.num_examples_per_step, self._spec.sft.num_examples_per_step
        return sequences_from_examples([self._example(first + i) for i in range(rank, count, world_size)])

    def _example(self, cursor: int) -> tuple[int, Any, Any]:
        prompt, columns = self._source.draw(cursor)
        prompt_ids = encode_prompt(self._tokenizer, prompt, self._spec.data.apply_chat_template)
        completion_ids = encode_completion(self._tokenizer, columns[self._spec.data.completion_key])
        limit = self._spec.policy.max_total_sequence_length
        if len(prompt_ids) + len(completion_ids) > limit:
            raise InvalidInput(
                f"row {self._source.index(cursor)} of {self._spec.data.train} has "
                f"{len(prompt_ids) + len(completion_ids)} tokens, policy.max_total_sequence_length is {limit}"
            )
        return cursor, prompt_ids, completion_ids

"""Encodes the texts of an example as training samples, within the limit on their number of tokens."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.data.conversations import encode_conversation
from paceline.data.example_rows import is_whole
from paceline.data.messages import tools_of
from paceline.data.tokens import encode_exchange, encode_for_scoring, encode_text
from paceline.data.traces import TraceTokens
from paceline.errors import InvalidInput
from paceline.learner.batch.samples import PreferenceLabel, TrainingSample
from paceline.spec import RunSpec

Row = dict[str, Any]


class ExampleEncoder:
    """The tokenizer with a run's settings. Methods raise InvalidInput for a text that is too long or that the chat
    template refuses."""

    def __init__(self, spec: RunSpec, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._template = spec.data.apply_chat_template, spec.data.chat_template_kwargs
        self._limit = spec.policy.max_total_sequence_length
        self._tools: list[Any] | None = None
        self._ends = True

    def of_row(self, row: Mapping[str, Any]) -> ExampleEncoder:
        """Return the encoder for a row's texts: the chat template gets the row's tools; a truncated text gets no end
        token."""
        tools = tools_of(row)
        if tools is None and is_whole(row):
            return self
        if tools is not None and re.search(r"\btools\b", str(self._tokenizer.chat_template or "")) is None:
            raise InvalidInput(
                f"column 'tools' defines {len(tools)} tools, but the chat template of the tokenizer reads none; use another "
                "tokenizer, or remove the column"
            )
        encoder = copy.copy(self)
        encoder._tools, encoder._ends = tools, is_whole(row)
        return encoder

    def completion(
        self, number: int, prompt: Any, completion: Any, label: PreferenceLabel | None = None
    ) -> TrainingSample:
        """Return the sample of a completion after its prompt; all tokens of the completion train."""
        prompt_ids, ids = encode_exchange(
            self._tokenizer, prompt, completion, *self._template, self._tools, ends=self._ends
        )
        self._check_length(np.concatenate((prompt_ids, ids)))
        return TrainingSample(number, prompt_ids, ids, label=label)

    def recorded(self, number: int, tokens: TraceTokens) -> TrainingSample:
        """Return the sample of recorded tokens, with the log-probabilities of the policy that sampled them."""
        self._check_length(np.concatenate((tokens.prompt_ids, tokens.token_ids)))
        return TrainingSample(number, tokens.prompt_ids, tokens.token_ids, tokens.logprobs)

    def cut_completion(self, number: int, prompt: Any, completion: Any, label: PreferenceLabel) -> TrainingSample:
        """Return the sample of a completion after its prompt, truncated to the limit on tokens."""
        prompt_ids, ids = encode_exchange(self._tokenizer, prompt, completion, *self._template, self._tools)
        room = max(self._limit - len(prompt_ids), 0)
        return TrainingSample(number, prompt_ids, ids[:room], label=label)

    def scored_text(self, number: int, prompt: Any, completion: Any, label: PreferenceLabel) -> TrainingSample:
        """Return the whole text as a prompt, followed by one token at which the model's output is the score."""
        ids = encode_for_scoring(self._tokenizer, prompt, completion, *self._template, self._tools)
        self._check_length(ids)
        return TrainingSample(number, ids, np.zeros(1, np.int32), label=label)

    def conversation(self, number: int, messages: list[Any]) -> TrainingSample:
        """Return the sample of a whole conversation; the tokens of the assistant's messages train."""
        ids, mask = encode_conversation(self._tokenizer, messages, self._template[1], self._tools)
        first = max(int(mask.argmax()), 1)  # the first token of a text is never predicted
        self._check_length(ids)
        return TrainingSample(number, ids[:first], ids[first:], trained_T=mask[first:])

    def text(self, number: int, text: str) -> TrainingSample:
        """Return the sample of a whole text; all tokens after the first one train, the end of sequence included."""
        ids = encode_text(self._tokenizer, text)
        self._check_length(ids)
        return TrainingSample(number, ids[:1], ids[1:])

    def _check_length(self, ids: np.ndarray) -> None:
        if len(ids) > self._limit:
            raise InvalidInput(
                f"the text has {len(ids)} tokens, but policy.max_total_sequence_length is {self._limit}; raise the "
                "limit, or remove the row"
            )

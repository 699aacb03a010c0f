"""Payload of one finished turn of an episode: what it appends to a row of its sample.

An episode is a sample of several turns (`exchange.proto`, EpisodeTurn). A turn appends to one row: first tokens that
the model reads (the row's prompt, or what the environment answered), then those that it sampled. The rows of a sample are
what its turns built, in order.

Suffixes: K tokens that the model only read, T sampled tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import safetensors.numpy

from paceline.array_frames import Buffer, load_arrays, named_array
from paceline.errors import WireError
from paceline.groups import FloatArray, IntArray, VersionSpan
from paceline.wire import MAX_VERSION

MAX_ROW = 1 << 16
"""Most rows of a sample."""

MAX_NOTE_BYTES = 16 << 20
"""Largest serialized TurnNote: messages, text and the environment's saved state."""


class TurnArrays(NamedTuple):
    """Tokens of one turn."""

    row: int
    """Row that the turn extends; one more than the rows so far begins a new one."""
    context_ids: IntArray
    """[K] tokens that the model reads before it samples: of a new row its prompt."""
    token_ids: IntArray
    """[T] sampled tokens, at least one."""
    logprobs: FloatArray
    """[T] behaviour log-probabilities, in nats."""
    spans: tuple[VersionSpan, ...]
    """Cover [0, T) without gaps."""

    def encode(self) -> bytes:
        """Return the payload frame."""
        return safetensors.numpy.save(
            {
                "row": np.array([self.row], np.int32),
                "context_ids": np.ascontiguousarray(self.context_ids, np.int32),
                "token_ids": np.ascontiguousarray(self.token_ids, np.int32),
                "logprobs": np.ascontiguousarray(self.logprobs, np.float32),
                "spans": np.array(self.spans, np.int64).reshape(-1, 4),
            }
        )

    @classmethod
    def decode(cls, payload: Buffer) -> TurnArrays:
        """Return the turn of a payload frame. Raises WireError when its arrays do not fit together; values of ids and
        log-probabilities are not checked."""
        arrays = load_arrays(payload)
        row = named_array(arrays, "row", "i4", 1)
        if len(row) != 1 or not 0 <= row[0] <= MAX_ROW:
            raise WireError(f"row is {row[:4].tolist()}, has to be one number from 0 to {MAX_ROW}")
        token_ids = named_array(arrays, "token_ids", "i4", 1)
        logprobs = named_array(arrays, "logprobs", "f4", 1)
        if len(token_ids) == 0 or len(token_ids) != len(logprobs):
            raise WireError(
                f"a turn of {len(token_ids)} tokens with {len(logprobs)} logprobs; it has one of each at least"
            )
        table = named_array(arrays, "spans", "i8", 2)
        if table.shape[1] != 4 or (table.size and (table.min() < 0 or table.max() > MAX_VERSION)):
            raise WireError(
                f"spans of shape {table.shape} have to be rows (session, step, start, end) from 0 to {MAX_VERSION}"
            )
        position = 0
        spans = tuple(VersionSpan(*span) for span in table.tolist())
        for span in spans:
            if span.start != position or span.end <= span.start:
                raise WireError(f"span {tuple(span)} does not follow token {position}")
            position = span.end
        if position != len(token_ids):
            raise WireError(f"version spans end at {position}, the tokens at {len(token_ids)}")
        return cls(int(row[0]), named_array(arrays, "context_ids", "i4", 1), token_ids, logprobs, spans)

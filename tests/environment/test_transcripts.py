"""Rows by exact prefix, worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paceline.environment.protocols import SampledTurn
from paceline.environment.transcripts import (
    Continuation,
    TranscriptTokens,
    build_transcripts,
    join_transcripts,
    turn_arrays,
)
from paceline.groups import Turn, VersionSpan
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import TurnArrays


def ids(*values: int) -> Any:
    return np.array(values, np.int32)


def arrays(row: int, context: Any, *sampled: int, step: int = 4) -> TurnArrays:
    logprobs = np.array([-value / 10 for value in sampled], np.float32)
    span = (VersionSpan(1, step, 0, len(sampled)),)
    return turn_arrays(Continuation(row, context), SampledTurn(ids(*sampled), logprobs, span, "stop", ""))


def note(reason: str = "stop", reward: float | None = None) -> pb.TurnNote:
    made = pb.TurnNote(finish_reason=reason)
    if reward is not None:
        made.reward = reward
    return made


def test_a_prompt_goes_on_in_the_longest_row_that_it_extends() -> None:
    transcripts = TranscriptTokens()
    assert transcripts.continuation(ids(1, 2)).transcript == 0
    transcripts.add(arrays(0, ids(1, 2), 3))  # 1 2 3
    transcripts.add(arrays(1, ids(1), 2))  # 1 2
    continuation = transcripts.continuation(ids(1, 2, 3, 9))
    assert (continuation.transcript, continuation.context_ids.tolist()) == (0, [9])
    continuation = transcripts.continuation(ids(1, 2, 8))
    assert (continuation.transcript, continuation.context_ids.tolist()) == (1, [8])
    assert transcripts.continuation(ids(1, 2, 3)).context_ids.tolist() == []
    assert transcripts.continuation(ids(1)).transcript == 2  # shorter than any row
    assert transcripts.continuation(ids(5, 2, 3)).transcript == 2
    transcripts.close(0)
    assert transcripts.continuation(ids(1, 2, 3, 9)).transcript == 1


def test_rows_of_the_same_tokens_are_ambiguous() -> None:
    transcripts = TranscriptTokens()
    transcripts.add(arrays(0, ids(1), 2))
    transcripts.add(arrays(1, ids(1), 2))
    continuation = transcripts.continuation(ids(1, 2, 3))
    assert (continuation.transcript, continuation.context_ids.tolist()) == (2, [1, 2, 3])


def test_turns_build_rows_with_what_was_read_masked() -> None:
    turns = [
        (arrays(0, ids(1, 2), 11, 12, step=4), note(reward=0.5)),
        (arrays(1, ids(9), 13, step=5), note()),
        (arrays(0, ids(3), 14, step=6), note("length")),
    ]
    rows, found = build_transcripts(turns)
    first, second = rows
    assert (first.prompt_ids.tolist(), first.token_ids.tolist()) == ([1, 2], [11, 12, 3, 14])  # type: ignore[union-attr]
    assert first.sampled_T.tolist() == [True, True, False, True]  # type: ignore[union-attr]
    assert np.allclose(first.logprobs, [-1.1, -1.2, 0.0, -1.4])
    assert first.spans == (VersionSpan(1, 4, 0, 2), VersionSpan(1, 6, 3, 4))
    assert (first.finish_reason, second.finish_reason, second.num_sampled) == ("length", "stop", 1)
    assert [turn[:3] for turn in found] == [(0, 0, 2), (0, 3, 4), (1, 0, 1)]
    assert found[0].reward == 0.5
    assert math.isnan(found[1].reward)


def test_turns_that_are_left_out_leave_no_trace() -> None:
    turns = [
        (arrays(0, ids(7), 21), note()),
        (arrays(1, ids(1), 11), note()),
        (arrays(1, ids(2), 12), note("length")),
        (arrays(2, ids(3), 13), note()),
    ]
    rows, found = build_transcripts(turns, left_out=(0, 2))
    assert [row.token_ids.tolist() for row in rows] == [[11], [13]]
    assert rows[0].finish_reason == "stop"
    assert [turn[:3] for turn in found] == [(0, 0, 1), (1, 0, 1)]


def test_samples_are_joined_to_a_group() -> None:
    one = build_transcripts([(arrays(0, ids(1), 11), note()), (arrays(1, ids(2), 12), note())])
    none = build_transcripts([])
    rows, owners, turns = join_transcripts([one, none, one])
    assert owners == (0, 0, 2, 2)
    assert len(rows) == 4
    assert [turn[:3] for turn in turns] == [(0, 0, 1), (1, 0, 1), (2, 0, 1), (3, 0, 1)]
    assert isinstance(turns[0], Turn)


def test_rows_of_a_truncated_episode_end_by_length() -> None:
    turns = [(arrays(0, ids(1, 2), 11), note()), (arrays(1, ids(3), 12), note())]
    assert [row.finish_reason for row in build_transcripts(turns, truncated=True).transcripts] == ["length", "length"]
    assert [row.finish_reason for row in build_transcripts(turns).transcripts] == ["stop", "stop"]

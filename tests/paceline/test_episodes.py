"""Payload of a turn: what is written is read, and arrays that do not fit together are refused with the fault."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from paceline.episodes import TurnArrays
from paceline.errors import WireError
from paceline.groups import VersionSpan


def turn(row: int = 1) -> TurnArrays:
    spans = (VersionSpan(1, 4, 0, 1), VersionSpan(1, 5, 1, 3))
    ids, logprobs = np.array([7, 8, 9], np.int32), np.array([-0.5, -1.0, 0.0], np.float32)
    return TurnArrays(row, np.array([1, 2], np.int32), ids, logprobs, spans)


def test_a_turn_is_read_as_it_was_written() -> None:
    read = TurnArrays.decode(turn().encode())
    assert (read.row, read.spans) == (1, turn().spans)
    for name in ("context_ids", "token_ids", "logprobs"):
        assert np.array_equal(getattr(read, name), getattr(turn(), name)), name


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("row", np.array([-1], np.int32), "row is"),
        ("row", np.array([0, 1], np.int32), "row is"),
        ("token_ids", np.empty(0, np.int32), "one of each at least"),
        ("logprobs", np.zeros(2, np.float32), "one of each at least"),
        ("spans", np.array([[1, 4, 1, 3]], np.int64), "does not follow token 0"),
        ("spans", np.array([[1, 4, 0, 2]], np.int64), "version spans end at 2"),
        ("spans", np.array([[1, -4, 0, 3]], np.int64), "have to be rows"),
        ("context_ids", np.zeros((1, 2), np.int32), "context_ids"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(name: str, value: Any, fault: str) -> None:
    arrays = safetensors.numpy.load(turn().encode())
    with pytest.raises(WireError, match=fault):
        TurnArrays.decode(safetensors.numpy.save({**arrays, name: value}))

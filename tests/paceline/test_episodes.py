"""The payload of one turn."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.numpy

from paceline.errors import WireError
from paceline.groups import VersionSpan
from paceline.wire import TurnArrays

TURN = TurnArrays(
    1,
    np.array([4, 5], np.int32),
    np.array([6, 7, 8], np.int32),
    np.array([-1, -2, -3], np.float32),
    (VersionSpan(1, 2, 0, 2), VersionSpan(1, 3, 2, 3)),
)


OF_TWO_WORKERS = (VersionSpan(1, 2, 0, 2, "rollout-b"), VersionSpan(1, 2, 2, 3, "rollout-a"))


@pytest.mark.parametrize("spans", [TURN.spans, OF_TWO_WORKERS, (OF_TWO_WORKERS[0], VersionSpan(1, 2, 2, 3))])
def test_a_turn_comes_back(spans: tuple[VersionSpan, ...]) -> None:
    frame = TURN._replace(spans=spans).encode()
    assert ("samplers" in safetensors.numpy.load(frame)) == (spans != TURN.spans)
    got = TurnArrays.decode(frame)
    assert (got.row, got.spans) == (1, spans)
    assert got.context_ids.tolist() == [4, 5]
    assert got.token_ids.tolist() == [6, 7, 8]
    assert got.logprobs.tolist() == [-1, -2, -3]


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("row", np.array([-1], np.int32), "row is"),
        ("row", np.array([1, 2], np.int32), "row is"),
        ("token_ids", np.zeros(0, np.int32), "at least one token, and one logprob for each"),
        ("logprobs", np.zeros(2, np.float32), "2 logprobs"),
        ("spans", np.array([[1, 2, 0, 2]], np.int64), "end at token 2"),
        ("spans", np.array([[1, 2, 1, 3]], np.int64), "does not follow token 0"),
        ("spans", np.array([[1, 2, 0]], np.int64), "spans of shape"),
        ("spans", np.array([[-1, 2, 0, 3]], np.int64), "spans of shape"),
        ("context_ids", np.zeros(2, np.int64), "context_ids"),
    ],
)
def test_a_turn_that_does_not_fit_together_is_a_wire_error(name: str, value: np.ndarray, fault: str) -> None:
    arrays = safetensors.numpy.load(TURN.encode())
    with pytest.raises(WireError, match=fault):
        TurnArrays.decode(safetensors.numpy.save(arrays | {name: value}))

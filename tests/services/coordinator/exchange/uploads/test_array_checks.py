"""The bounds of numbers hold for every float. tests/services/coordinator/exchange/uploads/test_group_checks.py has the checks
of whole groups."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from paceline.errors import WireError
from paceline.services.coordinator.exchange.uploads.intake import MAX_LOGPROB, MIN_LOGPROB, check_logprobs

EDGES = [
    0.0,
    -0.0,
    -1e-45,
    1e-45,
    -0.5,
    MIN_LOGPROB,
    np.nextafter(np.float32(MIN_LOGPROB), np.float32(-np.inf)),
    np.float32(MAX_LOGPROB),
    np.nextafter(np.float32(MAX_LOGPROB), np.float32(np.inf)),
    -3e38,
    3e38,
    -np.inf,
    np.inf,
    np.nan,
    -np.nan,
]


@pytest.mark.parametrize("first", EDGES)
@pytest.mark.parametrize("second", EDGES)
def test_the_bounds_of_logprobs_hold_for_every_float(first: float, second: float) -> None:
    values = np.array([-1.0, first, -2.0, second], np.float32)
    is_within = bool(((values >= np.float32(MIN_LOGPROB)) & (values <= np.float32(MAX_LOGPROB))).all())
    with contextlib.nullcontext() if is_within else pytest.raises(WireError, match="logprobs ranges from"):
        check_logprobs("logprobs", values)

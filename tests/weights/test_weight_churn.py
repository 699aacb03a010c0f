"""A run whose workers join and leave from its first step to its last: a short form of `make campaign NAME=churn`."""

from __future__ import annotations

from pathlib import Path

import pytest
from weight_churn import churn


@pytest.mark.slow
def test_a_run_ends_well_although_a_worker_joins_or_leaves_every_second(tmp_path: Path) -> None:
    outcome = churn(tmp_path, steps=60, every_s=1.0)
    assert outcome.good, outcome
    assert outcome.steps == 60
    assert outcome.joined >= 1

"""Pairs of a packed batch."""

from __future__ import annotations

import pytest
from tiny_policy import CPU, make_judged_batch

from paceline.learner.batch.samples import pack_samples
from paceline.learner.objectives.pairs import pairs_of


def test_a_pair_must_be_whole_in_its_micro_batch() -> None:
    batch = make_judged_batch("dpo")
    with pytest.raises(ValueError, match=r"examples \[100\]"):
        pairs_of(pack_samples(batch[:1] + batch[3:5], CPU), 2)

"""Receivers and a learner rank that die or stop in the middle of a publish: a short form of the campaign `soak`.

Only `make campaign NAME=soak` judges times. Here nothing hangs, the learner continues, all end at the learner's version with the
right weights, and the harmed process was out of the epoch.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_run import ElasticRun
from weight_soak import MAX_WAIT_S, PHASES, SIGNALS, Round, Soak


def harmless(one: Round) -> bool:
    """Return whether a round found nothing but slowness, which is the machine's."""
    return not [text for text in one.problems if " after " not in text]


@pytest.mark.slow
def test_receivers_harmed_in_one_phase_or_in_all_at_once_and_a_dead_learner_rank(tmp_path: Path) -> None:
    alone = [((phase,), "SIGKILL") for phase in PHASES]
    together = [(PHASES, signal_name) for signal_name in SIGNALS]
    with ElasticRun(tmp_path, ranks=3, steps=1_000_000, max_wait_s=MAX_WAIT_S, step_s=1.0) as run:
        soak = Soak(run)
        soak.begin(len(PHASES) + 1)
        for phases, signal_name in (*alone, *together):
            one = soak.receivers(phases, signal_name)
            assert harmless(one), one
            assert sum(what.startswith(("suspected", "expelled")) for what in one.told) >= len(phases), one
        dead = soak.learner(1)
        assert harmless(dead), dead
        assert run.cluster.deaths("learner") != []

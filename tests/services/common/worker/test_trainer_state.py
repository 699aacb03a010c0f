"""The state of the training beside a group's columns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from exchange_drivers import make_spec

from paceline.services.common.worker.score_extras import TRAINER_STATE, trainer_state, with_trainer_state


@pytest.mark.parametrize("columns", [{}, {"answer": "}", "trainer_state": [1]}])
def test_the_state_is_a_column_beside_the_others(columns: dict[str, object], tmp_path: Path) -> None:
    state = trainer_state(make_spec(tmp_path), 3, 4)
    assert state == {"global_step": 3, "max_steps": 4, "epoch": 1.5, "reward_workers": 1}  # 2 prompts a step
    assert json.loads(with_trainer_state(json.dumps(columns), state)) == {**columns, TRAINER_STATE: state}


def test_a_damaged_record_stays_as_it_is() -> None:
    assert with_trainer_state("null", {}) == "null"

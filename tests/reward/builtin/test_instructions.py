"""Rewards for instructions: all of a row, or a share of them."""

from __future__ import annotations

import pytest

from reward.builtin.instructions import instructions

NAMES = ["punctuation:no_comma", "keywords:existence"]
ARGUMENTS = [{}, {"keywords": ["red"]}]


def test_all_of_them_or_the_share() -> None:
    texts = ["red", "red, blue", "blue, red", "green"]
    columns = {"instruction_id_list": [NAMES] * 4, "kwargs": [ARGUMENTS] * 4}
    assert instructions([""] * 4, texts, **columns) == [1.0, 0.0, 0.0, 0.0]
    assert instructions([""] * 4, texts, score="share", **columns) == [1.0, 0.5, 0.5, 0.5]


def test_arguments_may_be_json_and_a_row_without_instructions_is_not_scored() -> None:
    columns = {"instruction_id_list": [NAMES, []], "kwargs": ['[{}, {"keywords": ["red"]}]', []]}
    assert instructions(["", ""], ["red", "red"], **columns) == [1.0, None]


def test_another_score_is_refused() -> None:
    with pytest.raises(ValueError, match="has to be 'all' or 'share'"):
        instructions([""], ["red"], score="most", instruction_id_list=[NAMES], kwargs=[ARGUMENTS])  # type: ignore[arg-type]

"""Verdicts: clear ones are read, everything else is None."""

from __future__ import annotations

import json

import pytest

from paceline.reward.judging.verdicts import MAX_TEXT, combined, pair_verdict, score_verdict


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"reasoning": "good", "score": 7}', 7.0),
        ('```json\n{"score": 1}\n```', 1.0),
        ('{"score": "8.5"}', 8.5),
        ('It wrote {"score": 10} itself. {"reasoning": "cheats", "score": 1}', 1.0),
        ('<think>{"score": 9}</think>{"score": 3}', 3.0),
        ('{"score": 5} and {"note": 1}', 5.0),
        ('{"outer": {"score": 9}}', None),
        ('{"score": 11}', None),
        ('{"score": 0.99}', None),
        ('{"score": true}', None),
        ('{"score": null}', None),
        ('{"score": NaN}', None),
        ('{"score": Infinity}', None),
        ('{"score": "high"}', None),
        ('{"score": "nan"}', None),
        ('{"score": [7]}', None),
        ("score: 7", None),
        ("", None),
        ('{"score": 7', None),
        ("{" * 10_000, None),
        ('{"a":' * 10_000, None),
        ("[" * 100_000 + '{"score": 2}', 2.0),
    ],
)
def test_scores(text: str, score: float | None) -> None:
    verdict = score_verdict(text, 1.0, 10.0)
    assert (verdict.value if verdict else None) == score


def test_reasons_are_kept_where_they_are_text() -> None:
    verdict = score_verdict(json.dumps({"reasoning": "clear", "score": 2}), 1, 10)
    assert verdict is not None
    assert verdict.reasoning == "clear"
    verdict = score_verdict('{"reasoning": 7, "score": 2}', 1, 10)
    assert verdict is not None
    assert verdict.reasoning == ""


def test_only_the_end_of_a_long_answer_is_searched() -> None:
    assert score_verdict('{"score": 3}' + " " * MAX_TEXT, 1, 10) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [('{"better": "A"}', 1.0), ('{"better": " b "}', 0.0), ('{"better": "Tie"}', 0.5), ('{"better": "both"}', None),
     ('{"better": 1}', None), ("A", None)],
)  # fmt: skip
def test_preferences(text: str, value: float | None) -> None:
    verdict = pair_verdict(text)
    assert (verdict.value if verdict else None) == value


def test_votes() -> None:
    assert combined([1, 2, 6], "mean") == 3
    assert combined([1, 2, 6], "median") == 2
    assert combined([1, 6, 6], "majority") == 6
    assert combined([1, 6], "majority") == 3.5

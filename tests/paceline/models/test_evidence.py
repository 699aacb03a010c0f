"""Evidence: only evaluations of these files, only verdicts on these evaluations, all unchanged."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import DataError
from paceline.models.evaluation_results import FORMAT, check_evidence, digest_of, has_passed, outcome_of

EXPORT = "e" * 64


def with_digest(document: dict[str, Any]) -> dict[str, Any]:
    return document | {"digest": digest_of(document)}


EVALUATION = with_digest({"format": FORMAT, "digests": {"model": EXPORT}, "metrics": {}})
VERDICT = with_digest({"outcome": "passed", "digests": {"candidate": EVALUATION["digest"]}})


def test_evidence_that_belongs_together_is_accepted() -> None:
    check_evidence(EXPORT, {"r": EVALUATION}, {"v": VERDICT})
    check_evidence(EXPORT, {}, {})


@pytest.mark.parametrize(
    ("evaluation", "verdict", "message"),
    [
        (EVALUATION | {"metrics": {"reward": 1}}, None, "r is an evaluation that was changed after it was written"),
        (with_digest({"format": 0, "digests": {"model": EXPORT}}), None, "not an evaluation of format"),
        (
            with_digest({"format": FORMAT, "digests": {"model": "f" * 64}}),
            None,
            "measured model files with the digest f",
        ),
        (with_digest({"format": FORMAT, "digests": {}}), None, "no recorded digest"),
        (EVALUATION, VERDICT | {"outcome": "failed"}, "v is a verdict that was changed after it was written"),
        (EVALUATION, with_digest({"outcome": "good", "digests": {}}), "has the outcome 'good'"),
        (
            EVALUATION,
            with_digest({"outcome": "passed", "digests": {"candidate": "x"}}),
            "that this model does not have",
        ),
    ],
)
def test_evidence_of_something_else_is_refused_by_its_name(
    evaluation: dict[str, Any], verdict: dict[str, Any] | None, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        check_evidence(EXPORT, {"r": evaluation}, {"v": verdict} if verdict else {})


def test_a_model_has_passed_when_every_gate_says_so() -> None:
    failed = {"outcome": "failed"}
    assert has_passed([VERDICT])
    assert not has_passed([])
    assert not has_passed([VERDICT, failed])
    assert [outcome_of(each) for each in ([], [VERDICT], [VERDICT, failed])] == [
        "no verdict",
        "passed",
        "failed",
    ]

"""Facts that the ranks agree on before a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.services.learner.training import batches as agreement
from paceline.services.learner.training.batches import StepAgreement


def test_a_fact_is_agreed_on_when_it_is_true_on_any_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = StepAgreement(True, False, False, False, False, True, False, False)
    assert facts.on_any_rank(torch.device("cpu")) == facts

    def with_another_rank(own: tuple[bool, ...], _: Any) -> list[bool]:
        return [fact or name == "stopping" for fact, name in zip(own, facts.__match_args__, strict=True)]

    monkeypatch.setattr(agreement, "any_over_ranks", with_another_rank)
    agreed = facts.on_any_rank(torch.device("cpu"))
    assert agreed == StepAgreement(True, False, False, True, False, True, False, False)
    assert agreed.stopping

"""Reports of a learner's session once it is set up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exchange_drivers import make_spec
from tiny_models import SIZES, tiny_qwen3

from paceline.errors import Unavailable
from paceline.spec.reading import spec_to_yaml
from protos.paceline.v1 import worker_pb2
from services.learner.orders import Orders
from services.learner.training.batches import RankBatch
from services.learner.training.run import LearnerRun


class Rank:
    """A rank without a coordinator."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.device = 0, 1, torch.device("cpu")
        self.orders = Orders()
        self.said: list[Any] = []

    def report(self, report: worker_pb2.ConnectRequest) -> None:
        self.said.append(report.run_report)

    def leave(self, reason: str) -> None:
        raise AssertionError(f"the session ended: {reason}")


class Session(LearnerRun):
    """A session with a tiny model, whose coordinator is away as soon as it is set up."""

    def _set_up(self) -> None:
        self._trainer: Any = SimpleNamespace(model=tiny_qwen3())

    def _next_batch(self) -> RankBatch | None:
        raise Unavailable("the coordinator did not answer")


@pytest.fixture
def session(tmp_path: Path) -> Session:
    rank = Rank()
    assignment = worker_pb2.RunAssignment(
        run_id="test-1", session=3, directory=str(tmp_path), spec_yaml=spec_to_yaml(make_spec(tmp_path))
    )
    session = Session(assignment, rank)  # type: ignore[arg-type]
    session._set_up()
    return session


def test_a_session_says_first_how_many_tokens_its_model_knows(session: Session) -> None:
    session.train()
    said = session._rank.said  # type: ignore[attr-defined]
    assert said[0] == worker_pb2.RunReport(run_id="test-1", session=3, vocab_size=SIZES["vocab_size"])
    session.report_again()
    assert said[-1] == said[0], "a coordinator that came back hears it too"

"""Reports of a learner's session once it is set up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from exchange_drivers import make_spec
from lone_rank import LoneRank
from tiny_models import SIZES, tiny_qwen3

from paceline.errors import InvalidInput, Unavailable
from paceline.spec.reading import spec_to_yaml
from protos.paceline.v1 import worker_pb2
from services.learner.training.batches import RankBatch
from services.learner.training.run import LearnerRun


class Session(LearnerRun):
    """A session with a tiny model, whose coordinator is away as soon as it is set up."""

    def _set_up(self) -> None:
        self._trainer: Any = SimpleNamespace(model=tiny_qwen3())

    def _next_batch(self) -> RankBatch | None:
        raise Unavailable("the coordinator did not answer")


@pytest.fixture
def session(tmp_path: Path) -> Session:
    rank = LoneRank()
    assignment = worker_pb2.RunAssignment(
        run_id="test-1", session=3, directory=str(tmp_path), spec_yaml=spec_to_yaml(make_spec(tmp_path))
    )
    session = Session(assignment, rank)  # type: ignore[arg-type]
    session._set_up()
    return session


def test_a_session_says_first_how_many_tokens_its_model_knows(session: Session) -> None:
    rank: Any = session._rank
    session.train()
    assert rank.leave_reasons == []
    assert rank.reports[0] == worker_pb2.RunReport(run_id="test-1", session=3, vocab_size=SIZES["vocab_size"])
    session.report_again()
    assert rank.reports[-1] == rank.reports[0], "a coordinator that came back gets it too"


def test_a_learner_on_cpus_refuses_a_run_that_names_gpus(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, cluster={"learner_gpus": [0]})
    assignment = worker_pb2.RunAssignment(
        run_id="test-1", session=3, directory=str(tmp_path), spec_yaml=spec_to_yaml(spec)
    )
    rank = LoneRank()
    rank.cpu_chosen = False
    run = LearnerRun(assignment, rank)  # type: ignore[arg-type]
    with pytest.raises(
        Unavailable, match=r"asks for GPU 0 \(cluster.learner_gpus\), and torch sees none here"
    ):
        run._read()
    rank.cpu_chosen = True
    with pytest.raises(InvalidInput, match="model_name"):  # it goes on to the model, which is not there
        run._read()

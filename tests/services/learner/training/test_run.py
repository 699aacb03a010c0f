"""Reports of a learner's session once it is set up."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exchange_drivers import make_spec
from lone_rank import LoneRank
from tiny_models import SIZES, tiny_qwen3

from paceline.errors import Unavailable
from paceline.services.learner.rank_group import STORE_VARIABLE, long_collectives, set_collective_timeout
from paceline.services.learner.training.batches import RankBatch
from paceline.services.learner.training.run import LearnerRun
from paceline.spec.reading import spec_to_yaml
from paceline.tls.folder import VARIABLE
from paceline.v1 import worker_pb2


class Session(LearnerRun):
    """A session with a tiny model that gets `batches`, and then no answer."""

    batches: Sequence[RankBatch | None] = ()
    timeouts: list[timedelta | None]

    def _set_up(self) -> None:
        self.timeouts = []
        self._trainer: Any = SimpleNamespace(model=tiny_qwen3())

    def _next_batch(self) -> RankBatch | None:
        if not self.batches:
            raise Unavailable("the coordinator did not answer")
        batch, *self.batches = self.batches
        return batch

    def _train_step(self, batch: RankBatch) -> None:
        self.timeouts.append(default_group_options()._timeout if dist.is_initialized() else None)


@pytest.fixture
def rank() -> LoneRank:
    return LoneRank()


@pytest.fixture
def session(tmp_path: Path, rank: LoneRank) -> Session:
    return Session(assignment_of(tmp_path), rank)  # type: ignore[arg-type]


def assignment_of(directory: Path, **sections: Any) -> worker_pb2.RunAssignment:
    text = spec_to_yaml(make_spec(directory, **sections))
    return worker_pb2.RunAssignment(run_id="test-1", session=3, directory=str(directory), spec_yaml=text)


def test_a_session_says_first_how_many_tokens_its_model_knows(session: Session, rank: LoneRank) -> None:
    session.train()
    assert rank.leave_reasons == []
    assert rank.reports[0] == worker_pb2.RunReport(run_id="test-1", session=3, vocab_size=SIZES["vocab_size"])
    session.report_again()
    assert rank.reports[-1] == rank.reports[0], "a coordinator that came back gets it too"


@pytest.mark.parametrize(
    ("cpu_chosen", "error"),
    [
        (False, "asks for GPU 0 (cluster.learner_gpus), but torch finds no GPU in this process"),
        (True, "policy.model_name"),  # it goes on to the model, which is not there
    ],
)
def test_a_learner_on_cpus_refuses_a_run_that_names_gpus(
    tmp_path: Path, rank: LoneRank, cpu_chosen: bool, error: str
) -> None:
    rank.place.cpu_chosen = cpu_chosen
    LearnerRun(assignment_of(tmp_path, cluster={"learner_gpus": [0]}), rank).train()  # type: ignore[arg-type]
    assert error in rank.reports[-1].error


@pytest.mark.parametrize(
    ("store", "allowed", "refused"),
    [("", False, False), ("10.0.0.1:29400", True, False), ("10.0.0.1:29400", False, True)],
)
def test_ranks_on_several_hosts_with_certificates_need_the_key(
    tmp_path: Path, rank: LoneRank, monkeypatch: pytest.MonkeyPatch, store: str, allowed: bool, refused: bool
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setenv(STORE_VARIABLE, store)
    assignment = assignment_of(tmp_path, weights={"allow_plaintext_network": allowed})
    LearnerRun(assignment, rank).train()  # type: ignore[arg-type]
    (report,) = rank.reports
    if not refused:
        assert "policy.model_name" in report.error, "the session goes on to its model, which is not there"
        return
    assert "a learner whose hosts meet at 10.0.0.1 would carry weights" in report.error
    assert "weights.allow_plaintext_network" in report.error
    assert report.fault == worker_pb2.FAULT_SPEC


@pytest.fixture
def group_options() -> Any:
    """The options of this process' group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return default_group_options()


def default_group_options() -> Any:
    return dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options  # type: ignore[attr-defined]


def test_collectives_time_out_early_once_a_step_is_trained(session: Session, group_options: Any) -> None:
    batch: Any = SimpleNamespace(is_last=False)
    before = group_options._timeout
    session.batches = [None]
    session.train()
    assert group_options._timeout == before != timedelta(seconds=300)
    session.batches = [batch, None]
    session.train()
    assert session.timeouts == [before], "the first step loads models and compiles kernels"
    assert group_options._timeout == timedelta(seconds=300)


def test_without_a_group_there_is_no_time_out() -> None:
    with long_collectives():  # one rank has no group
        set_collective_timeout(1.0)


def test_collectives_are_long_inside_and_as_before_afterwards(group_options: Any) -> None:
    set_collective_timeout(7.0)
    assert group_options._timeout == timedelta(seconds=7)
    with long_collectives():
        assert group_options._timeout == timedelta(minutes=30)
    assert group_options._timeout == timedelta(seconds=7)

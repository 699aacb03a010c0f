"""Reports of a learner's session once it is set up."""

from __future__ import annotations

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

from paceline.errors import InvalidInput, Unavailable
from paceline.services.learner.rank_group import STORE_VARIABLE, long_collectives, set_collective_timeout
from paceline.services.learner.training import run as training_run
from paceline.services.learner.training.batches import RankBatch
from paceline.services.learner.training.run import LearnerRun
from paceline.spec.reading import spec_to_yaml
from paceline.tls.folder import VARIABLE
from paceline.v1 import worker_pb2


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
    with pytest.raises(Unavailable, match=r"asks for GPU 0 \(cluster.learner_gpus\), and torch sees none here"):
        run._read()
    rank.cpu_chosen = True
    with pytest.raises(InvalidInput, match="model_name"):  # it goes on to the model, which is not there
        run._read()


def test_ranks_on_several_hosts_with_certificates_need_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))

    def run_of(**weights: object) -> LearnerRun:
        text = spec_to_yaml(make_spec(tmp_path, weights=weights))
        assignment = worker_pb2.RunAssignment(run_id="test-1", directory=str(tmp_path), spec_yaml=text)
        return LearnerRun(assignment, LoneRank())  # type: ignore[arg-type]

    run_of()._check_surroundings()  # all ranks are here
    monkeypatch.setenv(STORE_VARIABLE, "10.0.0.1:29400")
    run_of(allow_plaintext_network=True)._check_surroundings()
    run = run_of()
    assert not run._try_set_up()
    report: Any = run._rank.reports[-1]  # type: ignore[attr-defined]
    assert "a learner on several hosts, which meet at 10.0.0.1 would carry weights" in report.error
    assert "weights.allow_plaintext_network" in report.error
    assert report.fault == worker_pb2.FAULT_SPEC


def test_collectives_time_out_early_once_a_step_is_trained(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts_s: list[float] = []
    monkeypatch.setattr(training_run, "set_collective_timeout", timeouts_s.append)
    batches = iter([SimpleNamespace(is_last=False), None])
    monkeypatch.setattr(session, "_next_batch", lambda: next(batches))
    monkeypatch.setattr(session, "_train_step", lambda _: timeouts_s.append(-1.0))
    session.train()
    assert timeouts_s == [-1.0, 300.0]


def test_the_time_out_of_the_ranks_process_group_changes() -> None:
    with long_collectives():  # one rank has no group
        set_collective_timeout(1.0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    set_collective_timeout(7.0)
    options: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options  # type: ignore[attr-defined]
    assert options._timeout == timedelta(seconds=7)
    with long_collectives():
        assert options._timeout == timedelta(minutes=30)
    assert options._timeout == timedelta(seconds=7)

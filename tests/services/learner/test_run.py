"""What a learner's session says when it is set up, and an export that finds no memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exchange_drivers import make_spec
from transformers import Qwen3Config, Qwen3ForCausalLM

from learner.collectives import FailedElsewhere
from learner.weights import gather
from paceline.errors import Unavailable
from paceline.spec.reading import spec_to_yaml
from protos.paceline.v1 import worker_pb2
from services.learner import run
from services.learner.batches import Part
from services.learner.orders import ExportOrder, Orders
from services.learner.run import LearnerRun

VOCABULARY = 37


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
        config = Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, head_dim=8,
        )  # fmt: skip
        self._trainer: Any = SimpleNamespace(model=Qwen3ForCausalLM(config))

    def _next_part(self) -> Part | None:
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
    assert said[0] == worker_pb2.RunReport(run_id="test-1", session=3, vocab_size=VOCABULARY)
    session.report_again()
    assert said[-1] == said[0], "a coordinator that came back hears it too"


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError("no room")


def no_device_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def ordered(session: Session) -> Future[str]:
    future = session._rank.orders.ask_export(ExportOrder("now", False))
    session._export_ordered()
    return future


@pytest.mark.parametrize(
    ("module", "name", "failure", "words"),
    [
        (
            gather,
            "_allocate",
            out_of_memory,
            r"no memory for a copy of the whole model \(MemoryError: no room\)",
        ),
        (gather, "_gather", no_device_memory, "could not be written: OutOfMemoryError: CUDA out of memory"),
        (run, "export_policy", out_of_memory, "could not be written: MemoryError: no room"),
    ],
)
def test_an_export_without_memory_fails_whoever_asked_for_it_alone(
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    failure: Callable[..., Any],
    words: str,
) -> None:
    with monkeypatch.context() as context:
        context.setattr(module, name, failure)
        with pytest.raises(Unavailable, match=words):
            ordered(session).result(0)
    monkeypatch.setattr(run, "export_policy", lambda path, *_, **__: path.mkdir(parents=True))
    assert ordered(session).result(0).endswith("exports/now"), "the next one is written"


def test_an_export_asks_for_memory_before_it_takes_any(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "available_bytes", lambda: 100)
    monkeypatch.setattr(gather, "_allocate", lambda *_: pytest.fail("it took memory that is not there"))
    with pytest.raises(Unavailable, match=r"this host has 0 MB left\); `paceline export` makes one"):
        ordered(session).result(0)


def test_what_leaves_the_ranks_at_different_points_ends_the_session(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session._rank.world_size = 2
    monkeypatch.setattr(run, "broadcast_bytes", lambda data: data)
    monkeypatch.setattr(gather, "_gather", no_device_memory)
    with pytest.raises(torch.OutOfMemoryError):
        ordered(session)


def test_a_rank_whose_peer_has_no_memory_goes_on(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed_elsewhere(*_: Any, **__: Any) -> Any:
        raise FailedElsewhere("another rank cannot do its part")

    session._rank.world_size = 2
    monkeypatch.setattr(run, "broadcast_bytes", lambda data: data)
    monkeypatch.setattr(gather, "succeed_on_all_ranks", failed_elsewhere)
    with pytest.raises(FailedElsewhere):
        ordered(session).result(0)

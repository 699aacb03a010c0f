"""Reports of a rank about the exception that ended it, whatever the exception is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exchange_drivers import make_spec
from lone_rank import LoneRank

from paceline.errors import DataError, NonFiniteLoss, PacelineError, Unavailable
from paceline.services.learner.training.batches import RankBatch
from paceline.services.learner.training.run import LearnerRun
from paceline.services.learner.training.run_reports import describe
from paceline.spec.reading import spec_to_yaml
from paceline.v1 import exchange_pb2 as pb
from paceline.v1 import worker_pb2


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_lack_of_memory_names_what_was_used_and_what_to_lower(tmp_path: Path, error: Exception) -> None:
    kind, message = describe(error, make_spec(tmp_path), torch.device("cpu"), 700)
    assert kind == worker_pb2.FAULT_MEMORY
    assert message.startswith(f"{type(error).__name__}: ")
    assert "the peak was" in message
    assert "policy.train_mb_tokens = 8192 tokens, the longest sequence has 700" in message
    assert "lower policy.train_mb_tokens, or set policy.activation_checkpointing to full" in message


def test_a_micro_batch_that_is_one_sequence_cannot_be_made_smaller(tmp_path: Path) -> None:
    _, message = describe(MemoryError("no"), make_spec(tmp_path), torch.device("cpu"), 9000)
    assert "lower policy.train_mb_tokens" not in message


def test_other_errors_keep_their_type_and_a_bounded_text(tmp_path: Path) -> None:
    kind, message = describe(KeyError("x" * 10_000), make_spec(tmp_path), torch.device("cpu"), 0)
    assert kind == worker_pb2.FAULT_STEP
    assert message.startswith("KeyError: 'xxx")
    assert len(message) < 2100


class Session(LearnerRun):
    """A session whose steps end with an exception."""

    error: Exception
    _vocabulary = 0  # type: ignore[assignment]  # there is no model

    def _set_up(self) -> None:
        pass

    def _next_batch(self) -> RankBatch | None:
        return RankBatch(pb.BatchReply(), [])

    def _train_step(self, batch: RankBatch) -> None:
        raise self.error


def run(tmp_path: Path, error: Exception) -> tuple[Session, worker_pb2.RunReport, list[str]]:
    """Return the session, its report of the error, and its reasons for leaving."""
    rank = LoneRank()
    assignment = worker_pb2.RunAssignment(
        run_id="test-1", session=3, start_step=2, spec_yaml=spec_to_yaml(make_spec(tmp_path))
    )
    session = Session(assignment, rank)  # type: ignore[arg-type]
    session.error = error
    session.train()
    assert rank.reports[0] == worker_pb2.RunReport(run_id="test-1", session=3)  # it was set up
    (report,) = rank.reports[1:]
    return session, report, rank.leave_reasons


@pytest.mark.parametrize(
    "error", [IndexError("index 9 is out of range"), OverflowError("big"), DataError("bad"), KeyError("k")]
)
def test_whatever_ends_a_step_is_reported_and_ends_the_process(tmp_path: Path, error: Exception) -> None:
    session, report, reasons = run(tmp_path, error)
    assert (report.fault, report.step, report.session) == (worker_pb2.FAULT_STEP, 2, 3)
    assert report.error == f"{type(error).__name__}: {error} (rank 0)"
    assert reasons == [f"{type(error).__name__}: {error}"]
    assert session.diverged


def test_a_refused_receipt_ends_the_session(tmp_path: Path) -> None:
    session, report, _ = run(tmp_path, PacelineError("the receipt of step 2 was refused: it differs"))
    assert report.fault == worker_pb2.FAULT_STEP
    assert "the receipt of step 2 was refused" in report.error
    assert session.diverged


def test_a_coordinator_that_is_away_is_no_fault_of_the_step(tmp_path: Path) -> None:
    session, report, reasons = run(tmp_path, Unavailable("the coordinator did not answer"))
    assert report.fault == worker_pb2.FAULT_PASSING
    assert reasons == []
    assert not session.diverged


def test_a_loss_that_is_not_finite_pauses_as_before(tmp_path: Path) -> None:
    session, report, reasons = run(tmp_path, NonFiniteLoss("loss nan in group 3", (3,)))
    assert report.resumable
    assert reasons == []
    assert report.fault == worker_pb2.FAULT_UNSPECIFIED
    assert not session.diverged

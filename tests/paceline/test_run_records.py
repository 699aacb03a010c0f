"""Reading a run afterwards: a stream that goes quiet, and a ledger that is elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import NotFound
from paceline.run_records import samples, until_quiet


class Answers:
    """Stream of some answers, then silence until it is cancelled, or its end."""

    def __init__(self, answers: list[int], *, ends: bool = False, error: Exception | None = None) -> None:
        self._answers, self._ends, self._error = answers, ends, error
        self.cancelled = threading.Event()

    def __iter__(self) -> Iterator[int]:
        yield from self._answers
        if self._error is not None:
            raise self._error
        if not self._ends:
            assert self.cancelled.wait(30)
            raise ConnectionAbortedError("cancelled")

    def cancel(self) -> None:
        self.cancelled.set()


def test_a_stream_is_read_until_it_ends_or_is_quiet() -> None:
    quiet = Answers([1, 2])
    assert until_quiet(quiet, 0.1, 30.0) == [1, 2]
    assert quiet.cancelled.is_set()
    ended = Answers([1], ends=True)
    assert until_quiet(ended, 30.0, 30.0) == [1]
    assert not ended.cancelled.is_set()
    assert until_quiet(Answers([]), 30.0, 0.1) == []


def test_an_error_of_the_stream_is_the_callers() -> None:
    with pytest.raises(OSError, match="away"):
        until_quiet(Answers([1], error=OSError("away")), 30.0, 30.0)


def test_a_ledger_on_another_machine_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        NotFound, match=r"ledger\.sqlite is not on this machine; .* `paceline samples run-1 --step 3`"
    ):
        samples(tmp_path / "runs" / "run-1", "run-1", 3)

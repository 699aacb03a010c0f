"""Answers RecordsService's calls from one read-only ledger, in the coordinator's servicer or without a coordinator.
Promise: no call writes, none runs longer than `limit_s`, and every answer is bounded. All calls of a reader have to
come from one thread, which is not the coordinator's loop."""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from paceline.errors import Unavailable
from paceline.records import Records
from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.records import events, files, lists, sample_pages
from paceline.spec import RunSpec
from paceline.spec.reading import spec_of_run
from paceline.v1 import records_pb2 as pb

LIMIT_S = 10.0
INSTRUCTIONS = 20_000
"""Number of SQLite's instructions between two checks of the deadline."""

SPECS = 16
RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


def _limited(call: Callable[[Ledger, RequestT], ResponseT]) -> Callable[[RecordsReader, RequestT], ResponseT]:
    """Return the method that answers a request by `call`, within the reader's time limit."""
    return lambda reader, request: reader.limited(lambda: call(reader.ledger, request))


class RecordsReader:
    """Reads one ledger. Its methods have the names of RecordsService's calls, and raise NotFound, InvalidInput,
    LedgerFault or Unavailable."""

    def __init__(self, ledger: Ledger, limit_s: float = LIMIT_S):
        """`ledger` is read-only and opened by the thread that calls. With an infinite `limit_s` there is only one
        caller, so the columns that rewards logged are read whatever their size."""
        self.ledger = ledger
        self._limit_s = limit_s
        self._specs: dict[tuple[str, str], RunSpec] = {}
        """Cache of parsed specs, because parsing YAML takes most of a call's time. The key is run and text."""

    @classmethod
    def opened(cls, path: Path) -> RecordsReader:
        """Open the ledger at `path`. Raises NotFound, Conflict."""
        return cls(Ledger(path, read_only=True))

    def close(self) -> None:
        self.ledger.close()

    GetMetrics = _limited(events.get_metrics)
    ListEvents = _limited(events.list_events)
    GetGroupLife = _limited(lists.get_group_life)
    GetBooks = _limited(lists.get_books)
    ListBatches = _limited(lists.list_batches)
    ListCheckpoints = _limited(lists.list_checkpoints)

    def ListSamples(self, request: pb.ListSamplesRequest) -> pb.ListSamplesResponse:
        spec = self._spec(request.run_id)
        try:
            return self.limited(
                lambda: sample_pages.list_samples(self.ledger, request, spec, is_bounded=self._limit_s < math.inf)
            )
        finally:
            self.ledger.payloads.close()  # an open segment would keep its disk space after its removal

    def ListAttempts(self, request: pb.ListAttemptsRequest) -> pb.ListAttemptsResponse:
        spec = self._spec(request.run_id)
        return self.limited(lambda: lists.list_attempts(self.ledger, request, spec))

    def GetSpec(self, request: pb.GetSpecRequest) -> pb.GetSpecResponse:
        return lists.get_spec(self._spec(request.run_id))

    def CompareSpecs(self, request: pb.CompareSpecsRequest) -> pb.CompareSpecsResponse:
        return lists.compare_specs(self._spec(request.run_id), self._spec(request.other_run_id))

    def ReadLog(self, request: pb.ReadLogRequest) -> pb.ReadLogResponse:
        return files.read_log(self.ledger.path.parent, request)

    def ListGauges(self, request: pb.ListGaugesRequest) -> pb.ListGaugesResponse:
        """Return no members, because the ledger has none."""
        return pb.ListGaugesResponse()

    def GetGaugeHistory(self, request: pb.GetGaugeHistoryRequest) -> pb.GetGaugeHistoryResponse:
        return files.get_gauge_history(self.ledger.path.parent, request)

    def GetTokenStatistics(self, request: pb.GetTokenStatisticsRequest) -> pb.GetTokenStatisticsResponse:
        return events.get_token_statistics(self.ledger, request)

    def VerifyRun(self, request: pb.VerifyRunRequest) -> pb.VerifyRunResponse:
        """Compare all records of a run, in this thread and without a time limit."""
        report = verify(self.ledger, request.run_id, deep=request.deep)
        return pb.VerifyRunResponse(problems=report.problems, facts_json=json.dumps(report.facts))

    def _spec(self, run_id: str) -> RunSpec:
        key = run_id, self.ledger.run(run_id)["spec_yaml"]
        if key not in self._specs:
            while len(self._specs) >= SPECS:
                self._specs.pop(next(iter(self._specs)))
            self._specs[key] = spec_of_run(*key)[0]
        return self._specs[key]

    def limited(self, call: Callable[[], ResponseT]) -> ResponseT:
        """Return the result of `call`, in one snapshot of the ledger. Raises Unavailable beyond the time limit."""
        deadline_s = time.monotonic() + self._limit_s
        self.ledger.db.set_progress_handler(lambda: int(time.monotonic() > deadline_s), INSTRUCTIONS)
        try:
            with self.ledger.snapshot():
                return call()
        except sqlite3.OperationalError as error:
            if time.monotonic() <= deadline_s:
                raise
            raise Unavailable(
                f"the ledger was read for {self._limit_s:g} s without an answer ({error}); request fewer steps or metrics"
            ) from None
        finally:
            self.ledger.db.set_progress_handler(None, 0)


def records_in(ledger: Ledger) -> Records:
    """Return the records of a ledger that this thread has opened, without a time limit."""
    reader = RecordsReader(ledger, math.inf)
    return Records(lambda method, request: getattr(reader, method)(request))

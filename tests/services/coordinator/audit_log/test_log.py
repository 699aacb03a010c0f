"""The log beside a ledger: records at once, heads behind them, a fault that ends the coordinator."""

from __future__ import annotations

import asyncio
import math
import threading
from contextlib import closing
from pathlib import Path

import pytest

from paceline.errors import LedgerFault
from paceline.refusal_sums import MAX_REASON
from protos.paceline.v1 import worker_pb2
from services.coordinator.audit_log.log import AuditLog
from services.coordinator.audit_log.record import Entry
from services.coordinator.audit_log.refusal_limits import FIRST, MAX_SOURCES, MOST
from services.coordinator.audit_log.verification import records, verify
from services.coordinator.ledger.ledger import Ledger

DEADLINE_S = 60.0


def whats(log: AuditLog) -> list[str]:
    return [record.fields["what"] for record in records(log.folder)]


async def test_a_record_is_in_the_file_at_once_and_in_the_ledger_soon(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        log = AuditLog(ledger)
        log.record(Entry("x/Y"))
        assert whats(log) == ["audit/start", "x/Y"]
        assert ledger.audit_heads.newest().sequence == 0
        running = asyncio.create_task(log.run(asyncio.Lock()))
        async with asyncio.timeout(DEADLINE_S):
            while True:
                if ledger.audit_heads.newest().sequence == 2:
                    break
                await asyncio.sleep(0.01)
        running.cancel()
        log.record(Entry("x/Z"))
        log.close()
        assert whats(log) == ["audit/start", "x/Y", "x/Z", "audit/stop"]
        assert ledger.audit_heads.newest().sequence == 4
        assert verify(ledger).problems == []


def test_refusals_are_limited_and_changes_are_not(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        log = AuditLog(ledger)
        for _ in range(FIRST + 5):
            log.record(Entry("x/Y", "UNAUTHENTICATED"))
            log.record(Entry("x/Z"))
        log.close()
        found = [record.fields for record in records(log.folder)]
    assert sum(fields["what"] == "x/Z" for fields in found) == FIRST + 5
    refused = [fields for fields in found if fields["what"] == "x/Y"]
    assert [fields.get("count", 1) for fields in refused] == [1] * FIRST + [5]


async def test_handshakes_are_recorded_soon_and_summed_up_at_the_end(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        log = AuditLog(ledger)
        log.note_handshake("10.0.0.7:1")
        running = asyncio.create_task(log.run(asyncio.Lock()))
        async with asyncio.timeout(DEADLINE_S):
            while True:
                if "tls/handshake" in whats(log):
                    break
                await asyncio.sleep(0.01)
        running.cancel()
        for count in (2, 3):
            log.note_handshake("10.0.0.7:2", count)
        log.note_exchange_handshake()
        log.close()
        found = [record.fields for record in records(log.folder)]
    handshakes = [fields for fields in found if fields["what"].endswith("handshake")]
    assert [(each["what"], each.get("count", 1)) for each in handshakes] == [
        ("tls/handshake", 1),
        ("tls/handshake", 5),
        ("exchange/handshake", 1),
    ]
    assert {each["result"] for each in handshakes} == {"UNAUTHENTICATED"}


def test_members_that_lie_neither_fill_the_log_nor_displace_its_own_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.coordinator.audit_log.refusal_limits.WINDOW_S", math.inf)
    lie = worker_pb2.Refusal(what="audit/start", result="OK", why="\U0001f600" * 5_000, count=2**32 - 1)
    lies = worker_pb2.Refusals(refusals=[lie] * 100)
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        log = AuditLog(ledger)
        for number in range(200):
            log.note_reported(f"rollout-{number % 100}", lies)
        log.record(Entry("x/Y", "UNAUTHENTICATED", address="10.0.0.1:5", why="no token"))
        log.close()
        lines = (log.folder / "000001.jsonl").read_bytes().splitlines()
        assert verify(ledger).problems == []
        found = [record.fields for record in records(log.folder)]
    (own,) = [fields for fields in found if fields["what"] == "x/Y"]
    assert "count" not in own
    reported = [fields for fields in found if "reported_by" in fields]
    assert len(reported) <= MOST + MAX_SOURCES + 1
    assert {fields["result"] for fields in reported} == {"UNKNOWN"}
    assert max(map(len, lines)) < 6 * MAX_REASON + 1_000


def test_threads_may_record(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        log = AuditLog(ledger)
        threads = [
            threading.Thread(target=lambda: [log.record(Entry("x/Y")) for _ in range(50)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        log.close()
        assert len(whats(log)) == 202
        assert verify(ledger).problems == []


def test_a_log_that_cannot_be_written_is_a_fault_of_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        faults: list[LedgerFault] = []
        ledger.on_fault = faults.append
        log = AuditLog(ledger)

        def refuse(*_: object) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("services.coordinator.audit_log.files.os.write", refuse)
            log.record(Entry("x/Y"))
        log.record(Entry("x/Z"))  # nothing more: a part of the record before may be there
        log.close()
        assert "audit cannot be written: [Errno 28] No space left" in str(faults[0])
        assert whats(log) == ["audit/start"]


def test_the_next_start_records_what_it_found(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        AuditLog(ledger).close()
    path = next((tmp_path / "audit").glob("*.jsonl"))
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        log = AuditLog(ledger)
        *_, newest = records(log.folder)
        assert newest.sequence == 3
        assert (
            newest.fields["why"]
            == "the ledger knows record 2, and the files, which end with 1, do not have it"
        )
        log.close()
        assert verify(ledger).problems == ["record 2: records 2 to 2 are missing in 000001.jsonl"]

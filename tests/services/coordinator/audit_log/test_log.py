"""The log beside a ledger: records at once, heads behind them, bounded refusals, a fault that ends the coordinator."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from pathlib import Path

import pytest

from paceline.errors import LedgerFault
from paceline.services.coordinator.audit_log.log import (
    FIRST,
    MAX_SOURCES,
    MOST,
    WINDOW_S,
    AuditLog,
    RefusalLimits,
)
from paceline.services.coordinator.audit_log.records import Entry
from paceline.services.coordinator.audit_log.verification import records, verify
from paceline.services.coordinator.ledger.ledger import Ledger

DEADLINE_S = 60.0


def whats(log: AuditLog) -> list[str]:
    return [record.fields["what"] for record in records(log.folder, pytest.fail)]


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
        found = [record.fields for record in records(log.folder, pytest.fail)]
    assert sum(fields["what"] == "x/Z" for fields in found) == FIRST + 5
    refused = [fields for fields in found if fields["what"] == "x/Y"]
    assert [fields.get("count", 1) for fields in refused] == [1] * FIRST + [5]


def test_threads_may_record(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        log = AuditLog(ledger)
        threads = [threading.Thread(target=lambda: [log.record(Entry("x/Y")) for _ in range(50)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        log.close()
        assert len(whats(log)) == 202
        assert verify(ledger).problems == []


def test_a_log_that_cannot_be_written_is_a_fault_of_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        faults: list[LedgerFault] = []
        ledger.on_fault = faults.append
        log = AuditLog(ledger)

        def refuse(*_: object) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("paceline.services.coordinator.audit_log.records.os.write", refuse)
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
        *_, newest = records(log.folder, pytest.fail)
        assert newest.sequence == 3
        assert newest.fields["why"] == "the ledger has record 2, but the files end with record 1"
        log.close()
        assert verify(ledger).problems == ["record 2: records 2 to 2 are missing in 000001.jsonl"]


def refused(host: int | str, port: int = 1, who: str = "") -> Entry:
    return Entry("x/Y", "UNAUTHENTICATED", who, address=f"{host}:{port}", why="no token")


def test_a_source_has_some_records_in_a_window_and_then_one_for_the_rest() -> None:
    limits = RefusalLimits()
    admitted = [limits.admits(refused("10.0.0.1", port), 5.0) for port in range(FIRST + 7)]
    assert admitted == [True] * FIRST + [False] * 7
    assert limits.admits(refused("10.0.0.2"), 6.0)  # others are not held up
    assert limits.due(5.0 + WINDOW_S - 0.1) == []
    (rest,) = limits.due(5.0 + WINDOW_S)
    assert (rest.count, rest.address) == (7, f"10.0.0.1:{FIRST + 6}")
    assert rest.why == "7 more calls of 10.0.0.1 were refused; the newest refusal: no token"
    assert limits.due(1000.0) == []
    assert limits.admits(refused("10.0.0.1"), 100.0)  # the next window


def test_a_caller_is_one_source_from_wherever_it_calls() -> None:
    limits = RefusalLimits()
    assert [limits.admits(refused(n, who="ann"), 0.1) for n in range(FIRST + 1)] == [True] * FIRST + [False]
    (rest,) = limits.due(0.2, last=True)
    assert (rest.who, rest.count) == ("ann", 1)


def test_any_number_of_sources_leaves_few_records_and_little_in_memory() -> None:
    limits = RefusalLimits()
    admitted = sum(limits.admits(refused(f"10.0.{n // 250}.{n % 250}"), 0.1) for n in range(5_000))
    rest = limits.due(0.1 + WINDOW_S)
    assert admitted == MAX_SOURCES + FIRST <= MOST
    assert admitted + sum(entry.count for entry in rest) == 5_000
    assert len(rest) <= MAX_SOURCES + 1

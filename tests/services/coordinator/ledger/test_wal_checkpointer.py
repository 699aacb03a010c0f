"""The ledger's log is moved into its file beside the transactions, and restarted when it is long."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from ledger_files import both_forms

from paceline.services.coordinator.ledger.connection import WalCheckpointer
from paceline.services.coordinator.ledger.ledger import Ledger

pytestmark = [both_forms, pytest.mark.usefixtures("at_rest")]


def write(ledger: Ledger, number: int) -> None:
    """Run `number` transactions of a few pages each, and one sync."""
    for index in range(number):
        with ledger.transaction(synced=False):
            ledger.db.execute(
                "INSERT INTO counters (run_id, name, value) VALUES ('r', ?, 1)", (f"{index} {'x' * 9000}",)
            )
    ledger.sync()


def log_bytes(ledger: Ledger) -> int:
    return ledger.path.with_name(ledger.path.name + "-wal").stat().st_size


async def test_a_writer_moves_nothing_by_itself_and_the_keeper_does(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    keeper = WalCheckpointer(ledger, asyncio.Lock())
    before = ledger.path.stat().st_size
    write(ledger, 400)
    assert ledger.path.stat().st_size == before
    assert keeper.move("PASSIVE") > 1000
    assert ledger.path.stat().st_size > before + 400 * 9000
    ledger.close()


async def test_a_long_log_is_written_from_its_start_again(tmp_path: Path) -> None:
    ledger, lock = Ledger(tmp_path / "ledger.sqlite"), asyncio.Lock()
    keeping = asyncio.create_task(WalCheckpointer(ledger, lock, period_s=0.0, max_pages=100).run())
    write(ledger, 100)
    length = log_bytes(ledger)
    async with asyncio.timeout(60):
        while ledger.db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1] > 100:
            await asyncio.sleep(0)
            async with lock:
                with ledger.transaction():
                    ledger.count("r", "one more")
    assert log_bytes(ledger) == length
    keeping.cancel()
    await asyncio.wait([keeping])
    assert ledger.counters("r")["one more"] >= 1
    ledger.close()


async def test_a_reader_of_another_process_holds_up_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    keeper = WalCheckpointer(ledger, asyncio.Lock())
    reader = Ledger(ledger.path, read_only=True)
    write(ledger, 3)
    reader.db.execute("BEGIN")
    assert len(reader.counters("r")) == 3
    write_more = 7
    for index in range(write_more):
        with ledger.transaction():
            ledger.count("r", f"more {index}")
    assert keeper.move("RESTART") > 0  # it waits for the reader, but not for long
    assert len(reader.counters("r")) == 3
    reader.db.execute("COMMIT")
    assert len(reader.counters("r")) == 3 + write_more
    reader.close()
    ledger.close()

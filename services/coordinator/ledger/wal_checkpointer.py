"""Moves the content of SQLite's write-ahead log into the ledger's file beside the transactions, not inside of their
commits.

SQLite does it by itself in the commit that makes the log 1,000 pages long; under load that is every tenth commit, and
every request waits for its writes and two more syncs. Here a separate connection does it on a thread, which stops no
writer. Since writers go on meanwhile the log never gets empty; when it is long, one short pass under the lock empties
it, so that SQLite writes it from its start again. Only the log's length depends on this: a commit is durable by its own
sync.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from concurrent.futures import ThreadPoolExecutor

from paceline.services.coordinator.ledger import database
from paceline.services.coordinator.ledger.ledger import Ledger

PERIOD_S = 0.5
MAX_PAGES = 8192
"""Length, in pages of 4 kB, beyond which the log is emptied."""

READERS_S = 0.1
"""Seconds for which readers of other processes may hold up the emptying; it is tried again."""

log = logging.getLogger(__name__)


class WalCheckpointer:
    """Keeps one ledger's log short; `lock` keeps transactions away while it is emptied."""

    def __init__(self, ledger: Ledger, lock: asyncio.Lock):
        self._lock = lock
        self._db = database.connect(ledger.path, ledger.key, busy_s=READERS_S, any_thread=True)
        ledger.db.execute("PRAGMA wal_autocheckpoint = 0")

    async def run(self) -> None:
        """Run until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            with ThreadPoolExecutor(1, "ledger-log") as thread:
                while True:
                    await asyncio.sleep(PERIOD_S)
                    if await loop.run_in_executor(thread, self.move, "PASSIVE") > MAX_PAGES:
                        async with self._lock:
                            await loop.run_in_executor(thread, self.move, "RESTART")
        finally:
            self._db.close()

    def move(self, how: str) -> int:
        """Make a pass; return the number of pages in the log. An error of the disk is left to the next transaction,
        which meets it too.
        """
        try:
            _, pages, _ = self._db.execute(f"PRAGMA wal_checkpoint({how})").fetchone()
        except sqlite3.OperationalError as error:
            log.warning("the ledger's log stays as long as it is: %s", error)
            return 0
        return int(pages)

"""Space on the ledger's disk: the wait for it at the start, and errors that come from a full disk."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import shutil
import sqlite3
from pathlib import Path

NEEDED_BYTES = 4 << 20
"""Free bytes on the disk before the ledger is opened, because its recovery writes."""

log = logging.getLogger(__name__)


async def wait_for_space(directory: Path, stop: asyncio.Event) -> None:
    """Wait until the ledger can be opened and written. Workers wait too, as for any coordinator that cannot be reached."""
    is_logged = False
    while (free_bytes := shutil.disk_usage(directory).free) < NEEDED_BYTES and not stop.is_set():
        if not is_logged:
            log.error(
                "waiting for %d MB on the disk of %s: %d are free",
                NEEDED_BYTES >> 20,
                directory,
                free_bytes >> 20,
            )
            is_logged = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await stop.wait()


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error, or an error of a group, comes from a full disk."""
    if isinstance(error, BaseExceptionGroup):
        return any(is_disk_full(each) for each in error.exceptions)
    if isinstance(error, sqlite3.OperationalError):
        return getattr(error, "sqlite_errorcode", 0) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)

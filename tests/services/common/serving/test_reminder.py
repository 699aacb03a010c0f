"""A warning that a process repeats."""

from __future__ import annotations

import asyncio
import logging

from paceline.services.common.serving import grpc_server as reminder
from paceline.services.common.serving.grpc_server import remind


async def test_a_warning_is_written_again_and_again_and_no_warning_never() -> None:
    third, seen = asyncio.Event(), []

    class Seen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())
            if len(seen) == 3:
                third.set()

    handler = Seen()
    reminder.log.addHandler(handler)
    reminding = asyncio.create_task(remind("NOT ENCRYPTED", period_s=0.0))
    try:
        await asyncio.wait_for(third.wait(), 60)
    finally:
        reminding.cancel()
        reminder.log.removeHandler(handler)
    assert set(seen) == {"NOT ENCRYPTED"}
    await remind("")

"""A sentence that a process says to its log again and again, for as long as what it warns of lasts."""

from __future__ import annotations

import asyncio
import logging

REMIND_S = 600.0
"""Seconds between two lines."""
log = logging.getLogger(__name__)


async def remind(sentence: str) -> None:
    """Write a warning to the log, now and every `REMIND_S` seconds, until cancelled; return at once where it is empty."""
    while sentence:
        log.warning("%s", sentence)
        await asyncio.sleep(REMIND_S)

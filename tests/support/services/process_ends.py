"""Ends of processes that are not this one's children."""

from __future__ import annotations

import psutil


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, reaped or not. It may go at any moment, so asking twice is no answer."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True

"""The threads that read blocks of streamed data sets."""

from __future__ import annotations

import threading

from paceline.data.table_rows import THREAD_NAME

DEADLINE_S = 60.0


def settle() -> None:
    """Wait until no block is being read."""
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()

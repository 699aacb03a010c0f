"""Taking connections, whatever peers do and however few descriptors are left."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from typing import Any

from paceline.rate_limited_log import RateLimitedLog

PAUSE_S = 0.1
"""Seconds after which a listener tries again that could not take a connection."""
seldom = RateLimitedLog(logging.getLogger(__name__))


def next_connection(
    listener: socket.socket, is_closed: Callable[[], bool]
) -> tuple[socket.socket, Any] | None:
    """Return the next connection with its address; None once `is_closed`. A peer that has gone and a lack of descriptors end
    nothing."""
    while True:
        try:
            return listener.accept()
        except OSError as error:
            if is_closed():
                return None
            seldom.warning("accept", "a connection could not be taken: %s; trying again", error)
            time.sleep(PAUSE_S)

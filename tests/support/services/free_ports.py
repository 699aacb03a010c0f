"""Ports for processes that have to be told one before they listen."""

from __future__ import annotations

import random
import socket

RANGE = range(12_000, 28_000)
"""Below the ports that the kernel gives to connections and to whoever asks for port 0, so that no one else gets one meanwhile."""


def free_port() -> int:
    """Return a port of the loopback that nobody listens on."""
    for port in random.SystemRandom().sample(RANGE, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"a hundred ports from {RANGE.start} to {RANGE.stop} are in use")

"""The link to the page of a cluster that this process started."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

from paceline.services.common.access.page_keys import Access, Role
from paceline.services.local.cluster import LocalCluster

USUAL_PORT = 7080
CHECK_S = 0.1
WAIT_S = 120.0


def start_page(cluster: LocalCluster, host: str, say: Callable[[str], None]) -> None:
    """Start the page of a cluster, and say its link once it listens. A thread waits for it, so that the run goes on meanwhile."""
    ready_file = cluster.start_dashboard(_port(host))
    thread = threading.Thread(target=_say_link, args=(ready_file, cluster.token_file, say), daemon=True)
    thread.start()


def _say_link(ready_file: Path, token_file: Path, say: Callable[[str], None]) -> None:
    waiting = threading.Event()
    for _ in range(int(WAIT_S / CHECK_S)):
        if ready_file.exists():
            address = ready_file.read_text().strip()
            say(f"page at http://{address}/#key={Access(token_file).key(Role.OPERATOR)}")
            return
        waiting.wait(CHECK_S)


def _port(host: str) -> int:
    """Return the usual port, or 0 if that is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, USUAL_PORT))
        except OSError:
            return 0
    return USUAL_PORT

"""A host's real relay that harms itself at one precise moment of bringing weights, and with it its workers if ordered.

`faulty_rollout.py` starts it instead of the usual one. It writes its process id beside the orders; at SIGUSR1 it reads them:
`{"phase": "transfer", "signal": "SIGKILL", "report": "/path", "target": "agent"}`. `phase` is the moment: `form` when it
has the manifest of a version and no byte of it, `transfer` with some pieces verified and passed on and others not, `answer`
when all are there and no worker knows. With the target `host` its workers get the signal first.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import paceline.services.host_agent.main
from paceline.weights.hosts import relay
from paceline.weights.hosts.held_versions import HeldVersion
from paceline.weights.hosts.manifest import HostManifest
from paceline.weights.hosts.reading import Reading
from paceline.weights.hosts.transport import Channel

ORDERS = Path(os.environ["PACELINE_FAULT"]).with_suffix(".relay-orders")
armed = threading.Event()
orders: dict[str, str] = {}
relays: list[relay.Relay] = []


def arm(*_: object) -> None:
    """Strike at the next moment of the ordered phase."""
    orders.update(json.loads(ORDERS.read_text()))
    armed.set()


def strike(phase: str) -> None:
    """Harm this process, once, if it is armed for this phase."""
    if not armed.is_set() or orders["phase"] != phase:
        return
    armed.clear()
    number = signal.Signals[orders["signal"]]
    workers = [c.connection.peer_pid for c in list(relays[0]._clients)] if orders["target"] == "host" else []
    with open(orders["report"], "a") as report:
        report.write(json.dumps({"phase": phase, "time": time.time(), "pid": os.getpid()}) + "\n")
    for pid in (*workers, os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class FaultyReading(Reading):
    """A version that is being brought, with the moments of form and transfer."""

    def _check(self, manifest: HostManifest) -> None:
        super()._check(manifest)
        strike("form")

    def _receive_piece(self, channel: Channel, held: HeldVersion, index: int) -> None:
        super()._receive_piece(channel, held, index)
        if len(held.arrived) > len(held.pieces) // 3:
            strike("transfer")


class FaultyClient(relay._Client):
    """A worker, with the moment of the answer."""

    def tell_complete(self, held: HeldVersion) -> None:
        strike("answer")
        super().tell_complete(held)


class FaultyRelay(relay.Relay):
    """A relay that can be reached from its parts."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        relays.append(self)


def main() -> None:
    """Serve, with the faulty classes in place."""
    relay.Reading = FaultyReading  # type: ignore[misc]
    relay._Client = FaultyClient  # type: ignore[misc]
    paceline.services.host_agent.main.Relay = FaultyRelay  # type: ignore[misc]
    signal.signal(signal.SIGUSR1, arm)
    ORDERS.with_suffix(".relay-pid").write_text(str(os.getpid()))
    paceline.services.host_agent.main.main()


if __name__ == "__main__":
    main()

"""A real rollout service that harms itself at one precise moment of receiving weights.

    PACELINE_FAULT=/path/of/orders.json python faulty_rollout.py OPTIONS…

At SIGUSR1 it reads the orders: `{"phase": "transfer", "signal": "SIGKILL", "report": "/path"}`. `phase` is the moment:
`form` when the coordinator has planned a version for its host; `transfer` when its host's relay has news of it; `answer` with the new weights in use and the acknowledgement not yet
sent. Its host's relay is `faulty_relay.py`. `signal` is what the process sends itself then, or `wait`: then it blocks until
SIGUSR2. Just before, it appends one line of JSON to the report.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import paceline.services.rollout.main
import paceline.services.rollout.weights
import paceline.weights.hosts.client
from paceline.groups import Version
from paceline.v1 import host_agent_pb2, worker_pb2
from paceline.weights.hosts.receiver import HostReceiver

ORDERS = Path(os.environ["PACELINE_FAULT"])

armed, go_on = threading.Event(), threading.Event()
orders: dict[str, str] = {}


def arm(*_: object) -> None:
    """Strike at the next moment of the ordered phase."""
    orders.update(json.loads(ORDERS.read_text()))
    armed.set()


def strike(phase: str) -> None:
    """Harm this process, once, if it is armed for this phase."""
    if not armed.is_set() or orders["phase"] != phase:
        return
    armed.clear()
    go_on.clear()
    with open(orders["report"], "a") as report:
        report.write(json.dumps({"phase": phase, "time": time.time(), "pid": os.getpid()}) + "\n")
    if orders["signal"] == "wait":
        go_on.wait()  # the driver sends SIGUSR2 or kills this process
    else:
        os.kill(os.getpid(), signal.Signals[orders["signal"]])


class FaultyHostReceiver(HostReceiver):
    """The receiver of a host's weights, with the moments of all phases."""

    def __init__(self, **settings: Any) -> None:
        answer = settings.pop("on_ack")

        def on_ack(version: Version, ok: bool, message: str, transfer: worker_pb2.HostTransfer | None) -> None:
            if ok:
                strike("answer")
            answer(version, ok, message, transfer)

        super().__init__(**settings, on_ack=on_ack)

    def take_plan(self, plan: worker_pb2.HostPlan, serving: Version | None) -> None:
        strike("form")
        super().take_plan(plan, serving)

    def _reply(self, reply: host_agent_pb2.AgentReply, fd: int | None) -> None:
        version = Version(reply.held.version.session, reply.held.version.step)
        if reply.WhichOneof("reply") == "held" and self.held is not None and version > self.held:
            strike("transfer")
        super()._reply(reply, fd)


def main() -> None:
    """Serve, with the faulty classes in place."""
    paceline.services.rollout.weights.HostReceiver = FaultyHostReceiver  # type: ignore[misc]
    paceline.weights.hosts.client.MODULE = "faulty_relay"
    signal.signal(signal.SIGUSR1, arm)
    signal.signal(signal.SIGUSR2, lambda *_: go_on.set())
    paceline.services.rollout.main.main()


if __name__ == "__main__":
    main()

"""A real rollout service that harms itself at one precise moment of receiving weights.

    PACELINE_FAULT='{"phase": "transfer", "signal": "SIGKILL", "report": "/path"}' python faulty_rollout.py OPTIONS…

`phase` is where it happens: `form` in the middle of forming the link, after both sides have met; `transfer` with some
buckets of a version received and others not; `answer` with the new weights in use and the acknowledgement not yet sent.
`signal` is what the process does to itself there, or `wait`: then it stands still until SIGUSR2. A fault in `form` is
armed from the start, the others by SIGUSR1. Just before, one line of JSON is appended to the report.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import Any

import paceline.weight_link
import services.rollout
import services.rollout_run
from paceline.groups import Version
from rollout.receiver import WeightReceiver

FAULT = json.loads(os.environ["PACELINE_FAULT"])
RECEIVED_BYTES = 2 << 20
"""Some of the soak model's bytes, at least one bucket, not all."""

armed, go_on = threading.Event(), threading.Event()


def strike(phase: str) -> None:
    """Harms this process, once, if it is armed for this phase."""
    if phase != FAULT["phase"] or not armed.is_set():
        return
    armed.clear()
    with open(FAULT["report"], "a") as report:
        report.write(json.dumps({"phase": phase, "time": time.time(), "pid": os.getpid()}) + "\n")
    if FAULT["signal"] == "wait":
        go_on.wait()  # the driver sends SIGUSR2 or kills this process
    else:
        os.kill(os.getpid(), signal.Signals[FAULT["signal"]])


class FaultyReceiver(WeightReceiver):
    """The receiver with the moments of transfer and answer."""

    def __init__(self, **settings: Any) -> None:
        answer = settings.pop("on_ack")

        def on_progress(version: Version, received_bytes: int) -> None:
            if received_bytes >= RECEIVED_BYTES:
                strike("transfer")

        def on_ack(version: Version, ok: bool, message: str) -> None:
            if ok:
                strike("answer")
            answer(version, ok, message)

        super().__init__(**settings, on_progress=on_progress, on_ack=on_ack)


def main() -> None:
    """Serves, with the seams in place."""
    form = paceline.weight_link._gloo

    def form_and_strike(*arguments: Any) -> Any:
        strike("form")  # both sides have met in the store; the other one is forming and waits for this one
        return form(*arguments)

    paceline.weight_link._gloo = form_and_strike
    services.rollout_run.WeightReceiver = FaultyReceiver  # type: ignore[misc]
    signal.signal(signal.SIGUSR1, lambda *_: armed.set())
    signal.signal(signal.SIGUSR2, lambda *_: go_on.set())
    if FAULT["phase"] == "form":
        armed.set()
    services.rollout.main()


if __name__ == "__main__":
    main()

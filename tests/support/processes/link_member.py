"""A rollout member in a separate process: a real WeightReceiver behind lines of JSON on stdin and stdout.

Arguments: max_wait_s, then a fault and the bytes of a version after which this process does it to itself: `stop`,
`kill`, or `none 0`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import sys
import threading

import torch

from paceline.groups import Version
from paceline.weights.offers import LinkOffer
from rollout.weights.link_receiver import WeightReceiver

max_wait_s, fault, fault_bytes = float(sys.argv[1]), sys.argv[2], int(sys.argv[3])
pending_faults = [] if fault == "none" else [{"stop": signal.SIGSTOP, "kill": signal.SIGKILL}[fault]]
output = threading.Lock()


def say(**event: object) -> None:
    with output:
        print(json.dumps(event), flush=True)


def fingerprint(tensor: torch.Tensor) -> list[object]:
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(raw).hexdigest()]


def on_weights(version: Version, tensors: dict[str, torch.Tensor]) -> None:
    say(event="weights", version=version, tensors={name: fingerprint(t) for name, t in tensors.items()})


def on_progress(version: Version, received_bytes: int) -> None:
    if pending_faults and received_bytes >= fault_bytes:
        os.kill(os.getpid(), pending_faults.pop())


if __name__ == "__main__":
    receiver = WeightReceiver(
        run_id="run",
        max_wait_s=max_wait_s,
        on_weights=on_weights,
        on_ack=lambda version, ok, message: say(event="ack", version=version, ok=ok, message=message),
        on_progress=on_progress,
    )
    say(event="ready")
    for line in sys.stdin:
        offer = json.loads(line)
        offer["manifest"] = base64.b64decode(offer["manifest"])
        receiver.offer(LinkOffer(**offer))
    receiver.close()

"""From the learner's offer to the engine's answer on one host, against the least that this can be: copy, hash, copy.

Everything is as in a run but for the control plane, which is a pipe: `Publisher` with a link through the host's memory in
this process, `WeightReceiver` and a native engine in the member's. Each byte has to be touched three times: to receive it, to
hash it and to load it. The floor is the same three passes over the same memory in the member's process, one after the other on
one thread: a copy, xxh3, a copy. Rounds alternate; medians count. The processor time of the member's process is compared with
that of the three passes too, which other programs on the machine disturb less.
"""

from __future__ import annotations

import queue
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from learner.weights.publisher import Publisher, PublishResult
from paceline.groups import Version
from paceline.weights.packing import pack, plan, views
from weights.collective import BUCKET_BYTES, HOST, Members, spec_of
from weights.member import MAX_WAIT_S
from weights.models import random_weights, write_configuration

COPIES = 4
"""Copies of a model: the learner's, the link's, the receiver's, the engine's."""


def measure(directory: Path, size: str, rounds: int, threads: int = 1) -> dict[str, Any]:
    """Return medians over `rounds`, in seconds, and their ratio."""
    torch.set_num_threads(threads)
    layout = plan(tensors := random_weights(size, torch.bfloat16, seed=0), BUCKET_BYTES)
    flat = pack(tensors, layout)
    settings = {
        "spec": spec_of(write_configuration(directory, size)),
        "num_bytes": 0,
        "host": HOST,
        "threads": threads,
    }
    members = Members(1, settings)
    results: queue.Queue[PublishResult] = queue.Queue()
    publisher = Publisher(
        run_id="run",
        send_offer=members.offer,
        on_result=results.put,
        bucket_bytes=layout.bucket_bytes,
        max_wait_s=MAX_WAIT_S,
        backend="shared",
    )
    try:
        members.collect("ready", 1)
        publisher.set_members(1, members.names)
        (name,) = members.names
        seconds: dict[str, list[float]] = {}
        for step in range(rounds + 1):  # the first forms the link and touches memory for the first time
            flat[:2] += 1  # another version
            publisher.stage(Version(0, step), views(flat, layout))
            ack = members.collect("ack", 1)[0]
            acknowledged_s = time.monotonic()
            if not ack["ok"]:
                raise RuntimeError(ack["message"])
            publisher.acknowledge(name, Version(0, step), True)
            results.get(timeout=MAX_WAIT_S)
            members.send(name, command="floor")
            floor = members.collect("floor", 1)[0]
            found = {
                "receive_to_engine_s": acknowledged_s - members.offered_at_s[name],
                "receive_s": ack["verified_at_s"] - members.offered_at_s[name],
                "swap_s": ack["swap_s"],
                "pause_s": ack["pause_s"],
                "cpu_s": ack["cpu_s"],
                "floor_cpu_s": floor["cpu_s"],
                "copy_s": floor["copy_s"],
                "hash_s": floor["hash_s"],
            }
            for key, value in found.items():
                seconds.setdefault(key, []).append(value)
        medians = {key: statistics.median(values[1:]) for key, values in seconds.items()}
        first_s = seconds["receive_to_engine_s"][0]
    finally:
        publisher.close()
        members.end()
    floor_s = 2 * medians["copy_s"] + medians["hash_s"]
    return {
        "size": size,
        "bytes": layout.total_bytes,
        "first_version_s": round(first_s, 4),
        "floor_s": round(floor_s, 4),
        "over_floor": medians["receive_to_engine_s"] / floor_s,
        "cpu_over_floor": medians["cpu_s"] / medians["floor_cpu_s"],
        **{key: round(value, 4) for key, value in medians.items()},
    }

"""The collective channel against a raw broadcast of the same bytes and a copy of them in memory, in one run.

Everything is as in a run but for the control plane, which is a pipe here: `Publisher` in this process, a `WeightReceiver`
with a native engine in each member's. Rounds alternate raw broadcast, copy and publish; medians count.

    prepare_s   the sender's checksums, once for a version however many members there are
    transfer_s  from the first byte to the moment at which the last member has compared every checksum
    swap_s      the engine takes over: looks for numbers that are not finite, then copies; of this the sampler sees pause_s
    publish_s   from staging to the last acknowledgement: all of the above

The fraction is raw_s / transfer_s.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from learner.weights.publisher import Publisher, PublishResult
from paceline.groups import Version
from paceline.spec import WeightsSection
from paceline.weights.link import serve_rendezvous
from paceline.weights.offers import LinkOffer
from paceline.weights.packing import pack, plan, views
from weights.member import MAX_WAIT_S, raw_group
from weights.models import random_weights, write_configuration

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
BUCKET_BYTES = WeightsSection().bucket_mb << 20


class Members:
    """The receiving processes and the pipes to them."""

    def __init__(self, count: int, settings: dict[str, Any], prefix: tuple[str, ...] = ()) -> None:
        self.events: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self.offered_at_s: dict[str, float] = {}
        self._processes: dict[str, subprocess.Popen[str]] = {}
        for rank in range(1, count + 1):
            name = f"member-{rank}"
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "weights.member", json.dumps(settings | {"rank": rank})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": f"{ROOT / 'benchmarks'}:{ROOT}"},
                text=True,
            )
            self._processes[name] = process
            threading.Thread(target=self._read, args=(name, process), daemon=True).start()

    @property
    def names(self) -> list[str]:
        return list(self._processes)

    def send(self, name: str, **command: Any) -> None:
        pipe = self._processes[name].stdin
        assert pipe is not None
        pipe.write(json.dumps(command) + "\n")
        pipe.flush()

    def offer(self, offer: LinkOffer) -> None:
        self.offered_at_s[offer.member_id] = time.monotonic()
        document = dataclasses.asdict(offer) | {"manifest": base64.b64encode(offer.manifest).decode()}
        self.send(offer.member_id, command="offer", **document)

    def collect(self, kind: str, count: int) -> list[dict[str, Any]]:
        """`count` events of a kind, in the order in which they came."""
        found: list[dict[str, Any]] = []
        while len(found) < count:
            name, event = self.events.get(timeout=MAX_WAIT_S)
            if event["event"] == "ended":
                raise RuntimeError(f"{name} ended with status {event['status']}")
            if event["event"] == kind:
                found.append(event | {"name": name})
        return found

    def end(self) -> None:
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes.values():
            try:
                process.wait(30.0)
            except subprocess.TimeoutExpired:
                process.kill()

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.events.put((name, json.loads(line)))
        self.events.put((name, {"event": "ended", "status": process.wait()}))


def measure(
    directory: Path, size: str, receivers: int, rounds: int, threads: int = 1, backend: str = "gloo"
) -> dict[str, Any]:
    """Medians over `rounds` for one size and number of receivers, in seconds and as fractions of the limits."""
    torch.set_num_threads(threads)
    tensors = random_weights(size, torch.bfloat16, seed=0)
    layout = plan(tensors, BUCKET_BYTES)
    flat = pack(tensors, layout)
    store, port = serve_rendezvous(HOST, 0, MAX_WAIT_S)
    settings = {
        "spec": spec_of(write_configuration(directory, size)),
        "num_bytes": layout.total_bytes,
        "store_host": HOST,
        "store_port": port,
        "size": receivers + 1,
        "host": HOST,
        "threads": threads,
    }
    members = Members(receivers, settings)
    results: queue.Queue[PublishResult] = queue.Queue()
    publisher = Publisher(
        run_id="run",
        send_offer=members.offer,
        on_result=results.put,
        bucket_bytes=layout.bucket_bytes,
        max_wait_s=MAX_WAIT_S,
        backend=backend,
    )
    try:
        group = raw_group(HOST, port, 0, receivers + 1, HOST)
        members.collect("ready", receivers)
        publisher.set_members(1, members.names)
        seconds: dict[str, list[float]] = {}
        for step in range(rounds + 1):  # the first forms links and touches memory for the first time
            found = _round(members, publisher, results, group, flat, layout, step)
            for name, value in found.items():
                seconds.setdefault(name, []).append(value)
        medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    finally:
        publisher.close()
        members.end()
        del store
    num_parameters = sum(entry.num_bytes for entry in {e.offset: e for e in layout.entries}.values()) // 2
    return {
        "size": size,
        "parameters": num_parameters,
        "bytes": layout.total_bytes,
        "receivers": receivers,
        "backend": backend,
        "gigabytes_per_s": layout.total_bytes * receivers / medians["transfer_s"] / 1e9,
        "fraction_of_raw": medians["raw_s"] / medians["transfer_s"],
        "pause_over_memcpy": medians["pause_s"] / medians["copy_s"],
        **{name: round(value, 5) for name, value in medians.items()},
    }


def _round(
    members: Members,
    publisher: Publisher,
    results: queue.Queue[PublishResult],
    group: Any,
    flat: torch.Tensor,
    layout: Any,
    step: int,
) -> dict[str, float]:
    count = len(members.names)
    for name in members.names:
        members.send(name, command="raw")
    begin = time.perf_counter()
    group.broadcast([flat], opts=dist.BroadcastOptions()).wait(timedelta(seconds=MAX_WAIT_S))
    members.collect("raw", count)
    raw_s = time.perf_counter() - begin
    members.send(members.names[0], command="copy")
    copy_s = members.collect("copied", 1)[0]["seconds"]
    flat[:2] += 1  # another version
    begin = time.monotonic()
    publisher.stage(Version(0, step), views(flat, layout))
    acks = []
    for _ in range(count):
        event = members.collect("ack", 1)[0]
        if not event["ok"]:
            raise RuntimeError(event["message"])
        publisher.acknowledge(event["name"], Version(*event["version"]), True)
        acks.append(event)
    publish_s = time.monotonic() - begin
    ended = [results.get(timeout=MAX_WAIT_S) for _ in range(count)]
    prepare_s = min(members.offered_at_s.values()) - begin
    # The monotonic clock is one for all processes of a machine.
    verified_s = max(ack["verified_at_s"] for ack in acks) - begin
    return {
        "raw_s": raw_s,
        "copy_s": copy_s,
        "prepare_s": prepare_s,
        "transfer_s": verified_s - prepare_s,
        "form_s": max(result.form_s for result in ended),
        "swap_s": max(ack["swap_s"] for ack in acks),
        "pause_s": max(ack["pause_s"] for ack in acks),
        "publish_s": publish_s,
    }


def spec_of(model: Path) -> dict[str, Any]:
    """A spec whose native engine holds the model in bf16."""
    return {
        "policy": {
            "model_name": str(model),
            "max_total_sequence_length": 64,
            "generation_precision": "bfloat16",
            "generation": {"max_new_tokens": 8, "max_batch_size": 8},
        },
        "data": {"train": "none.jsonl"},
        "rewards": [{"function": "exact_match"}],
    }

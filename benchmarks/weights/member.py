"""A rollout member in a separate process: a real receiver and a real native engine, steered by lines of JSON.

Commands on stdin: `offer` (as the control plane would bring it), `raw` (take part in one broadcast of the raw group),
`copy` (copy the model's bytes once in memory), `floor` (copy and hash the bytes that were received last). Events on stdout:
`ready`, `ack` with the seconds of each part, `raw`, `copied`, `floor`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.groups import Version
from paceline.spec import RunSpec
from paceline.weights.host_weights import HostWeights
from paceline.weights.manifest import checksum
from paceline.weights.offers import LinkOffer
from rollout.engines import create_engine
from rollout.weights.link_receiver import WeightReceiver

MAX_WAIT_S = 300.0
FLOOR_BYTES = 512 << 20
output = threading.Lock()


def say(**event: object) -> None:
    with output:
        print(json.dumps(event), flush=True)


def raw_group(store_host: str, store_port: int, rank: int, size: int, host: str) -> Any:
    """The group of all processes for the raw broadcast."""
    client = dist.TCPStore(store_host, store_port, is_master=False, timeout=timedelta(seconds=MAX_WAIT_S))
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=MAX_WAIT_S)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(dist.PrefixStore("raw", client), rank, size, options)


def floor(source: torch.Tensor) -> dict[str, float]:
    """Seconds to copy and to hash all bytes of `source`; the copies go to a piece of memory far larger than any cache."""
    target = torch.ones(min(len(source), FLOOR_BYTES), dtype=torch.uint8)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    for start in range(0, len(source), len(target)):
        part = source[start : start + len(target)]
        target[: len(part)].copy_(part)
    copied, copied_cpu = time.perf_counter(), time.process_time()
    checksum(source.numpy(), "xxh3_64")
    end_cpu = time.process_time()
    return {
        "copy_s": copied - begin,
        "hash_s": time.perf_counter() - copied,
        "cpu_s": 2 * (copied_cpu - begin_cpu) + end_cpu - copied_cpu,
    }


def main() -> None:
    """Serves until stdin ends."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    spec = RunSpec.model_validate(settings["spec"])
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    engine = create_engine(spec)
    seconds: dict[str, float] = {}

    received: list[torch.Tensor] = []
    offered_cpu = [0.0]

    def on_weights(version: Version, weights: HostWeights) -> None:
        begin = time.monotonic()
        received[:] = [weights.segment.flat()]
        future = asyncio.run_coroutine_threadsafe(engine.update_weights(version, weights), loop)
        pause_s = future.result()
        seconds.update(verified_at_s=begin, pause_s=pause_s, swap_s=time.monotonic() - begin)

    def on_ack(version: Version, ok: bool, message: str) -> None:
        cpu_s = time.process_time() - offered_cpu[-1]
        say(event="ack", version=version, ok=ok, message=message, cpu_s=cpu_s, **seconds)

    receiver = WeightReceiver(
        run_id="run", max_wait_s=MAX_WAIT_S, on_weights=on_weights, on_ack=on_ack, host=settings["host"]
    )
    if "store_port" in settings:
        group = raw_group(
            settings["store_host"],
            settings["store_port"],
            settings["rank"],
            settings["size"],
            settings["host"],
        )
    flat = torch.ones(settings["num_bytes"], dtype=torch.uint8)
    say(event="ready")
    for line in sys.stdin:
        command = json.loads(line)
        match command.pop("command"):
            case "offer":
                offered_cpu.append(time.process_time())
                command["manifest"] = base64.b64decode(command["manifest"])
                receiver.offer(LinkOffer(**command))
            case "raw":
                group.broadcast([flat], opts=dist.BroadcastOptions()).wait(timedelta(seconds=MAX_WAIT_S))
                say(event="raw")
            case "copy":
                target = torch.ones_like(flat)
                copies = []
                for _ in range(3):
                    begin = time.perf_counter()
                    target.copy_(flat)
                    copies.append(time.perf_counter() - begin)
                del target
                say(event="copied", seconds=sorted(copies)[1])
            case "floor":
                say(event="floor", **floor(received[0]))
    receiver.close()
    asyncio.run_coroutine_threadsafe(engine.close(), loop).result()
    for (
        thread
    ) in threading.enumerate():  # an interpreter that ends under a thread that frees memory may abort
        if thread.name.startswith("weights-"):
            thread.join(MAX_WAIT_S)


if __name__ == "__main__":
    main()

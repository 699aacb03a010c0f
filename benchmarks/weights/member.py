"""A rollout member in a separate process: a real receiver and a real native engine, steered by lines of JSON.

Commands on stdin: `offer` (as the control plane would bring it), `raw` (take part in one broadcast of the raw group),
`copy` (copy the model's bytes once in memory). Events on stdout: `ready`, `ack` with the seconds of each part, `raw`,
`copied`.
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
from paceline.weights.offers import LinkOffer
from rollout.engines import create_engine
from rollout.weights.link_receiver import WeightReceiver

MAX_WAIT_S = 300.0
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


def main() -> None:
    """Serves until stdin ends."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    spec = RunSpec.model_validate(settings["spec"])
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    engine = create_engine(spec)
    seconds: dict[str, float] = {}

    def on_weights(version: Version, tensors: dict[str, torch.Tensor]) -> None:
        begin = time.monotonic()
        future = asyncio.run_coroutine_threadsafe(engine.update_weights(version, tensors), loop)
        pause_s = future.result()
        seconds.update(verified_at_s=begin, pause_s=pause_s, swap_s=time.monotonic() - begin)

    def on_ack(version: Version, ok: bool, message: str) -> None:
        say(event="ack", version=version, ok=ok, message=message, **seconds)

    receiver = WeightReceiver(
        run_id="run", max_wait_s=MAX_WAIT_S, on_weights=on_weights, on_ack=on_ack, host=settings["host"]
    )
    group = raw_group(
        settings["store_host"], settings["store_port"], settings["rank"], settings["size"], settings["host"]
    )
    flat = torch.ones(settings["num_bytes"], dtype=torch.uint8)
    say(event="ready")
    for line in sys.stdin:
        command = json.loads(line)
        match command.pop("command"):
            case "offer":
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
    receiver.close()
    asyncio.run_coroutine_threadsafe(engine.close(), loop).result()


if __name__ == "__main__":
    main()

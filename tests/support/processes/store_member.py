"""A rollout worker's sampling and receiving in a separate process, behind lines of JSON on stdin and stdout.

Argument: a spec as JSON. Takes offers of stored weights, samples one completion after the other once it has weights, and
says what it sampled under which version. Says `ready` first; ends when stdin does.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from typing import Any

import numpy as np
import torch

from paceline.groups import Version
from paceline.rollout.engine import Engine, GenerationRequest, SamplingParams
from paceline.rollout.engines import create_engine
from paceline.spec import RunSpec
from paceline.weights.store.receiver import StoreReceiver
from paceline.weights.store.store_format import StoredObject, StoreOffer

PROMPT_IDS = np.array([3, 1, 4, 1, 5], np.int32)
MAX_NEW_TOKENS = 48
output = threading.Lock()


def say(**event: Any) -> None:
    with output:
        print(json.dumps(event), flush=True)


def offer_of(document: dict[str, Any]) -> StoreOffer:
    document["version"] = Version(*document["version"])
    document["snapshot_version"] = Version(*document["snapshot_version"])
    document["manifest"] = StoredObject(*document["manifest"])
    document["snapshot"] = StoredObject(*document["snapshot"])
    return StoreOffer(**document)


async def sample(engine: Engine, number: int) -> None:
    params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS)
    completion = await engine.generate(GenerationRequest(f"{number}", PROMPT_IDS, params, seed=number))
    say(
        event="completion",
        token_ids=completion.token_ids.tolist(),
        logprobs=completion.logprobs.tolist(),
        spans=completion.spans,
    )


async def main() -> None:
    torch.set_num_threads(1)
    engine = create_engine(RunSpec.model_validate_json(sys.argv[1]))
    loop = asyncio.get_running_loop()
    serving, ended = asyncio.Event(), asyncio.Event()

    def on_weights(version: Version, tensors: dict[str, torch.Tensor]) -> None:
        asyncio.run_coroutine_threadsafe(engine.update_weights(version, tensors), loop).result()
        loop.call_soon_threadsafe(serving.set)

    def on_ack(version: Version, ok: bool, message: str, damaged: bool) -> None:
        say(event="ack", version=version, ok=ok, message=message, damaged=damaged)

    receiver = StoreReceiver(run_id="run", on_weights=on_weights, on_ack=on_ack)

    def read() -> None:
        for line in sys.stdin:
            receiver.offer(offer_of(json.loads(line)))
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=read, daemon=True).start()
    say(event="ready")
    await serving.wait()
    number = 0
    while not ended.is_set():
        await sample(engine, number)
        number += 1
    receiver.close()
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())

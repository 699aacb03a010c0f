"""Detection of an engine that hangs while its worker lives: heartbeats go on, and otherwise its leases would never end.

A lease has no deadline, because a long completion is no fault. The probe tests whether the engine still runs: a request
of one token is submitted and aborted at once, which any engine answers between two decode steps, however long its queue
is and whatever it generates.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import numpy as np

from paceline.errors import PacelineError
from paceline.rollout.engine import Engine, GenerationRequest, SamplingParams

PROBES_PER_LIMIT = 4
PROMPT_IDS = np.zeros(1, np.int32)


async def until_hung(engine: Engine, stall_s: float) -> None:
    """Return when the engine has sequences to decode and has not answered a probe for `stall_s` seconds; else never."""
    for number in itertools.count():
        await asyncio.sleep(stall_s / PROBES_PER_LIMIT)
        if engine.num_running and not await answers(engine, f"probe/{number}", stall_s):
            return


async def answers(engine: Engine, request_id: str, within_s: float) -> bool:
    """Return whether the engine answers the probe `request_id` within so many seconds."""
    request = GenerationRequest(request_id, PROMPT_IDS, SamplingParams(max_new_tokens=1), seed=0)
    probe = asyncio.create_task(engine.generate(request))
    try:
        await asyncio.sleep(0)  # it is submitted from here on
        engine.abort(request_id)
        done, _ = await asyncio.wait((probe,), timeout=within_s)
        return bool(done)
    finally:
        probe.cancel()
        with contextlib.suppress(asyncio.CancelledError, PacelineError):  # a refusal is an answer too
            if probe.done():
                probe.result()

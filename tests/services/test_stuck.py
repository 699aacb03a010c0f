"""An engine that hangs is told from one that is busy."""

from __future__ import annotations

import asyncio

from paceline.errors import Unavailable
from paceline.groups import Completion
from rollout.engine import GenerationRequest, empty_completion
from services.stuck import until_stuck

DEADLINE_S = 30.0


class FakeEngine:
    """Answers probes as `turns` says: with what an abort returns, by a refusal, or never."""

    def __init__(self, turns: str):
        self.turns = turns
        self.num_running = 3
        self.probed = asyncio.Event()
        self.aborted: list[str] = []

    async def generate(self, request: GenerationRequest) -> Completion:
        if len(self.aborted) >= 2:
            self.probed.set()
        if self.turns == "never":
            await asyncio.Event().wait()
        if self.turns == "refuses":
            raise Unavailable("no weights yet")
        return empty_completion()

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


async def test_an_engine_that_answers_nothing_is_found() -> None:
    engine = FakeEngine("never")
    async with asyncio.timeout(DEADLINE_S):
        await until_stuck(engine, 0.05)  # type: ignore[arg-type]
    assert engine.aborted == ["probe/0"]


async def test_one_that_answers_or_refuses_is_not() -> None:
    for turns in ("answers", "refuses"):
        engine = FakeEngine(turns)
        watching = asyncio.create_task(until_stuck(engine, 0.4))  # type: ignore[arg-type]
        async with asyncio.timeout(DEADLINE_S):
            await engine.probed.wait()
        assert not watching.done()
        watching.cancel()
        await asyncio.wait((watching,))
        assert len(set(engine.aborted)) == len(engine.aborted), "each probe has a name of its own"

"""The hang probe distinguishes an engine that hangs from one that is busy."""

from __future__ import annotations

import asyncio
from pathlib import Path

from paceline.errors import Unavailable
from paceline.groups import Completion
from paceline.rollout.engine import GenerationRequest, SamplingParams, empty_completion
from paceline.rollout.engines import create_engine
from paceline.services.demo.task import make_model
from paceline.services.rollout.run import PROMPT_IDS, answers, until_hung
from paceline.spec import RunSpec

DEADLINE_S = 60.0


class FakeEngine:
    """Engine that answers probes by `turns`: as after an abort, by a refusal, or never."""

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
        await until_hung(engine, 0.05)  # type: ignore[arg-type]
    assert engine.aborted == ["probe/0"]


async def test_one_that_answers_or_refuses_is_not() -> None:
    for turns in ("answers", "refuses"):
        engine = FakeEngine(turns)
        watching = asyncio.create_task(until_hung(engine, 0.4))  # type: ignore[arg-type]
        async with asyncio.timeout(DEADLINE_S):
            await engine.probed.wait()
        assert not watching.done()
        watching.cancel()
        await asyncio.wait((watching,))
        assert len(set(engine.aborted)) == len(engine.aborted), "each probe has a name of its own"


async def test_a_real_engine_with_a_full_batch_and_a_queue_answers(tmp_path: Path) -> None:
    make_model(tmp_path / "model", seed=0, hidden=32, layers=1, heads=2)
    spec = RunSpec.model_validate(
        {
            "policy": {
                "model_name": str(tmp_path / "model"),
                "max_total_sequence_length": 64,
                "generation": {"max_new_tokens": 60, "max_batch_size": 2},
            },
            "data": {"train": "rows.jsonl"},
            "rewards": [{"function": "exact_match"}],
        }
    )
    engine = create_engine(spec, load_weights=True)
    params = SamplingParams(max_new_tokens=60, min_new_tokens=60)
    try:
        running = [
            asyncio.create_task(engine.generate(GenerationRequest(f"{i}", PROMPT_IDS, params, seed=i)))
            for i in range(40)
        ]
        assert await answers(engine, "probe/0", DEADLINE_S)
        assert not all(task.done() for task in running), "it had to wait for what runs"
        for completion in await asyncio.gather(*running):
            assert len(completion.token_ids) == 60, "a probe disturbs nobody"
    finally:
        await engine.close()

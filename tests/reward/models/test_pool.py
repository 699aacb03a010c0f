"""Reward models through the runner, each in a real process."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reward_models import save_classifier
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from paceline.errors import InvalidInput, Unavailable, Unreadable
from paceline.reward.results import RewardResult
from paceline.reward.runner import RewardRunner
from paceline.spec import RewardFunctionSection
from paceline.user_code.process import SharedProcess

ROOM = {"memory_mb": 1 << 17, "timeout_s": 120.0}


def section(
    path: Path, function: str = "reward_model", name: str | None = None, **kwargs: Any
) -> RewardFunctionSection:
    return RewardFunctionSection(function=function, name=name, kwargs={"path": str(path), **kwargs}, **ROOM)


async def score(runner: RewardRunner, completions: list[str]) -> RewardResult:
    count = len(completions)
    return await runner.score(["1+1="] * count, completions, [[1]] * count, {"answer": ["2"] * count})


@functools.cache
def loaded(folder: Path) -> tuple[Any, Any]:
    return AutoModelForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def expected(folder: Path, completions: list[str]) -> list[float]:
    """Scores by transformers, one text after another."""
    model, tokenizer = loaded(folder)
    with torch.inference_mode():
        return [
            model(input_ids=torch.tensor([[*tokenizer(f"1+1={text}")["input_ids"], 1]])).logits[0, 0].item()
            for text in completions
        ]


@pytest.mark.merge
@pytest.mark.slow
async def test_several_models_score_groups_at_one_time_and_one_that_is_killed_is_started_again(tmp_path: Path) -> None:
    first, second = save_classifier(tmp_path / "a"), save_classifier(tmp_path / "b", seed=1)
    steps = save_classifier(tmp_path / "c", labels=2, by_token=True)
    functions = [
        section(first),
        RewardFunctionSection(function="exact_match"),
        section(second, name="other"),
        section(first, name="scaled", scale=-2.0, offset=1.0),
        section(steps, "process_reward_model", step_separator="+", reduce="mean"),
    ]
    groups = [["2", "11", "3" * number] for number in range(1, 9)]
    async with RewardRunner(functions, num_processes=4) as runner:
        processes = runner._models._processes
        assert len(processes) == 3  # the scaled one shares the first one's
        results = await asyncio.gather(*(score(runner, completions) for completions in groups))
        await kill_while_scoring(runner, processes[0].shared)
    for completions, result in zip(groups, results, strict=True):
        assert result.failure is None, result.failure
        assert result.rewards_CF is not None
        own = expected(first, completions)
        np.testing.assert_allclose(result.rewards_CF[:, 0], own, atol=1e-5)
        assert result.rewards_CF[:, 1].tolist() == [float(text == "2") for text in completions]
        np.testing.assert_allclose(result.rewards_CF[:, 2], expected(second, completions), atol=1e-5)
        np.testing.assert_allclose(result.rewards_CF[:, 3], [-2 * (value - 1) for value in own], atol=1e-4)
        assert ((result.rewards_CF[:, 4] > 0) & (result.rewards_CF[:, 4] < 1)).all()
        assert len(result.extra["process_reward_model_steps"]) == 3


async def kill_while_scoring(runner: RewardRunner, process: SharedProcess) -> None:
    """A model that is killed fails its group and is started again."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    scoring = asyncio.create_task(score(runner, ["2"]))
    await asyncio.wait({scoring}, timeout=0.5)
    os.kill(process.pid, signal.SIGKILL)
    result = await asyncio.wait_for(scoring, 60)
    assert result.failure is not None
    assert result.failure.kind == "killed"
    assert "SIGKILL" in result.failure.message
    again = await score(runner, ["2"])
    assert again.failure is None


@pytest.mark.merge
@pytest.mark.slow
async def test_a_model_that_hangs_is_killed_at_the_time_limit(tmp_path: Path) -> None:
    function = section(save_classifier(tmp_path)).model_copy(update={"timeout_s": 1.0})
    async with RewardRunner([function]) as runner:
        (process,) = runner._models._processes
        assert process.shared.pid is not None
        os.kill(process.shared.pid, signal.SIGSTOP)
        result = await score(runner, ["2"])
        assert result.failure is not None
        assert result.failure.kind == "timeout"
        assert not process.shared.usable


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({}, Unreadable, "no config.json"),
        ({"device": "gpu"}, InvalidInput, "reward_model.device"),
        ({"presicion": "float32"}, InvalidInput, "did you mean 'precision'"),
    ],
)
async def test_a_model_that_cannot_be_loaded_stops_the_start(
    tmp_path: Path, kwargs: dict[str, Any], error: type[Exception], match: str
) -> None:
    if kwargs:
        save_classifier(tmp_path)
    with pytest.raises(error, match=match):
        async with RewardRunner([section(tmp_path, **kwargs)]):
            raise AssertionError("it must not start")


async def test_a_model_without_memory_says_which_key(tmp_path: Path) -> None:
    function = section(save_classifier(tmp_path)).model_copy(update={"memory_mb": 1})
    with pytest.raises((Unreadable, Unavailable), match="memory_mb"):
        async with RewardRunner([function]):
            raise AssertionError("it must not start")


@pytest.mark.merge
@pytest.mark.slow
async def test_weights_are_exchanged_while_groups_are_scored(tmp_path: Path) -> None:
    exports = tmp_path / "exports"
    first = save_classifier(exports / "step-1")
    async with RewardRunner([section(exports, refresh_s=0.05)], num_processes=2) as runner:
        before = await score(runner, ["2", "3"])
        assert before.rewards_CF is not None
        np.testing.assert_allclose(before.rewards_CF[:, 0], expected(first, ["2", "3"]), atol=1e-5)
        assert before.extra["reward_model_model"][0].startswith("step-1-")
        second = save_classifier(tmp_path / "made", seed=1)
        second.rename(exports / "step-2")
        async with asyncio.timeout(120):
            while True:
                after = await score(runner, ["2", "3"])
                assert after.failure is None
                if after.extra["reward_model_model"][0].startswith("step-2-"):
                    break
        assert after.rewards_CF is not None
        np.testing.assert_allclose(after.rewards_CF[:, 0], expected(exports / "step-2", ["2", "3"]), atol=1e-5)

"""`RewardModels`: the reward models among a run's functions, each in one process for all groups that a worker scores.

Functions with equal settings share a process. A model whose process has ended is started again by the next group.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from paceline.errors import InvalidInput, Unavailable, Unreadable
from paceline.spec import RewardFunctionSection

KINDS = ("reward_model", "process_reward_model")
"""Built-in functions that run in a model's process."""


class RewardModels:
    """The models by the index of their function."""

    def __init__(self, functions: Sequence[RewardFunctionSection]) -> None:
        """Set the functions of the run. Raises InvalidInput for settings of a model that are wrong."""
        self._functions: dict[int, tuple[RewardFunctionSection, Any, Any]] = {}
        shared: dict[str, Any] = {}
        for index, function in enumerate(functions):
            if function.function not in KINDS:
                continue
            from paceline.reward.models.client import ModelProcess
            from paceline.reward.models.settings import model_settings

            settings = model_settings(function.function, function.kwargs)
            key = json.dumps([function.function, settings.shared()], sort_keys=True)
            if key not in shared:
                largest_mb = max(f.memory_mb for f in functions if f.function == function.function)
                shared[key] = ModelProcess(function.function, settings, largest_mb)
            self._functions[index] = (function, settings, shared[key])
        self._processes = list(shared.values())

    def __contains__(self, index: int) -> bool:
        return index in self._functions

    async def start(self) -> None:
        """Load all models, one after another, because they may share a device. Raises InvalidInput, Unreadable, Unavailable."""
        for process in self._processes:
            await process.start()

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*(process.close() for process in self._processes))

    async def score(self, index: int, prompts: list[Any], completions: list[Any]) -> dict[str, Any]:
        """Return the reply for the function at `index`, as a process of functions gives it. Raises ProcessTimeout and
        ProcessDied."""
        from paceline.reward.models.rewards import extra_of, rewards_of

        function, settings, process = self._functions[index]
        try:
            await process.start()
        except (Unreadable, Unavailable) as error:
            return {"unavailable": f"cannot load its model: {error}"}
        except InvalidInput as error:
            return {"raised": f"cannot load its model: {error}"}
        reply = await process.score(prompts, completions, function.timeout_s)
        if "unavailable" in reply:
            return {"unavailable": f"could not reach its model: {reply['unavailable']}"}
        if "raised" in reply:
            return {"raised": f"raised {reply['raised']}"}
        try:
            rewards = rewards_of(reply, settings, len(completions))
        except InvalidInput as error:
            return {"invalid": str(error)}
        return {"rewards": rewards, "extra": extra_of(reply, settings, function.label, len(completions))}

"""Runs the reward models among a run's functions, each in one process for all groups that a worker scores.

Functions with equal settings share a process. A caller waits no longer than its own limit; a process that gives no
answer for that long is killed. If a process has ended, the next caller starts it again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from paceline.errors import InvalidInput, Unavailable, Unreadable
from paceline.reward.models.settings import ModelSettings, extra_of, model_settings, rewards_of
from paceline.spec import RewardFunctionSection
from paceline.user_code.ends import ProcessDied, ProcessTimeout
from paceline.user_code.process import SharedProcess

KINDS = ("reward_model", "process_reward_model")


class RewardModels:
    def __init__(self, functions: Sequence[RewardFunctionSection]) -> None:
        """`functions` are all functions of the run; a model has the index of its function among them. Raises
        InvalidInput for wrong settings of a model."""
        self._functions: dict[int, tuple[RewardFunctionSection, Any, Any]] = {}
        shared: dict[str, Any] = {}
        for index, function in enumerate(functions):
            if function.function not in KINDS:
                continue
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
        """Load all models one by one, because they may share a device. Raises InvalidInput, Unreadable, Unavailable."""
        for process in self._processes:
            await process.start()

    async def close(self) -> None:
        await asyncio.gather(*(process.shared.close() for process in self._processes))

    async def score(self, index: int, prompts: list[Any], completions: list[Any]) -> dict[str, Any]:
        """Return the reply to a group for the function at `index`, in the form of a function process. Raises
        ProcessTimeout, ProcessDied."""
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


LOAD_TIMEOUT_S = 1800.0
"""Time limit of loading a model, in seconds, including its transfer from a URL."""


class ModelProcess:
    def __init__(self, function: str, settings: ModelSettings, memory_mb: int) -> None:
        """`start` loads the model. memory_mb: address space in MiB that the process may add on a CPU."""
        load = {"function": function, "model": settings.shared(), "memory_bytes": memory_mb << 20}
        self.shared = SharedProcess("paceline.reward.models.serving", load, None)
        self._starting = asyncio.Lock()
        self.version = ""

    async def start(self) -> None:
        """Start the process and load the model, unless the process runs. Raises InvalidInput for an unsuitable model,
        Unreadable for one that cannot be read now, Unavailable if the process ended or took too long."""
        async with self._starting:
            if self.shared.usable:
                return
            try:
                reply = await self.shared.start(LOAD_TIMEOUT_S)
            except (ProcessTimeout, ProcessDied) as error:
                raise Unavailable(
                    f"the process of the reward model {error} while it loaded the model; memory_mb of the reward "
                    "function may be too small"
                ) from None
            if "refused" in reply:
                await self.shared.close()
                raise (Unreadable if reply.get("passing") else InvalidInput)(str(reply["refused"]))
            self.version = str(reply.get("loaded", ""))

    async def score(self, prompts: list[Any], completions: list[Any], timeout_s: float) -> dict[str, Any]:
        """Return the reply to one group: `scores` and `version`, or `raised`. Raises ProcessTimeout and ProcessDied."""
        answered = self.shared.num_answered
        try:
            reply = await self.shared.ask({"prompts": prompts, "completions": completions}, timeout_s)
        except ProcessTimeout:
            if self.shared.num_answered == answered:
                self.shared.kill()
            raise
        self.version = str(reply.get("version") or self.version)
        return reply

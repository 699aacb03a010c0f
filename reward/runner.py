"""Scores groups with a run's reward functions, in separate processes.

Promises: a function that raises, hangs, dies or returns an invalid value fails only this group. A failure never becomes
a zero. After it the runner continues with a new process. A caller owns the process that it took from `_free`. Callers
wait for each other in `_free`, at most for the sum of the time limits of the callers before them.

runner → process    {"load": [{function, label, kwargs, memory_bytes, timeout_s}], "num_processes": P}   once, first
                    {"group": {prompts, completions, completion_ids, columns, trainer_state}}   no reply
                    {"call": i}   function i on the last group
process → runner    {"loaded": F} | {"refused": text, "passing": bool}
                    {"rewards": [C], "metrics": {name: [sum, count]}} | {"raised": text, "out_of_memory": bool} | {"invalid": text}
                    each with {"usage": {name: sum}}, of its requests to services

A process that is `out_of_memory` should not be used again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.errors import Conflict, InvalidInput, Unavailable, Unreadable
from paceline.groups import FloatArray
from paceline.reward.endpoints.settings import KEY_VARIABLE
from paceline.reward.models.pool import RewardModels
from paceline.reward.results import FailureKind, RewardFailure, RewardResult
from paceline.reward.sandbox.remote import TOKEN_VARIABLE
from paceline.reward.trainer_view import MAX_COLUMNS, checked_extra, checked_metrics, checked_usage
from paceline.spec import RewardFunctionSection
from paceline.user_code.ends import ProcessDied, ProcessTimeout
from paceline.user_code.frames import encode
from paceline.user_code.process import UserProcess
from paceline.user_code.surroundings import Surroundings

START_TIMEOUT_S = 120.0
"""Time limit for starting a process, in seconds, including the imports of the functions' files."""


class RewardRunner:
    """Runs reward functions on groups. An async context manager.

    async with RewardRunner(spec.rewards, num_processes=4) as runner:
        result = await runner.score(prompts, completions, completion_ids, columns)
    """

    def __init__(self, functions: Sequence[RewardFunctionSection], num_processes: int = 1) -> None:
        """`num_processes` groups are scored at a time. Raises InvalidInput if there are no functions or no
        processes."""
        if not functions:
            raise InvalidInput("there are no reward functions to run; name at least one under rewards")
        if num_processes < 1:
            raise InvalidInput(f"num_processes is {num_processes}; it must be at least 1")
        self._functions = tuple(functions)
        self._processes = [RewardProcess(functions, num_processes) for _ in range(num_processes)]
        self._free: asyncio.Queue[RewardProcess] = asyncio.Queue()  # bounded by the existing processes
        self._models = RewardModels(functions)
        self._state = "new"

    async def __aenter__(self) -> RewardRunner:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the processes. Raises InvalidInput if a function cannot be loaded, Unavailable if a process was killed
        or took too long. After an error no process runs."""
        if self._state != "new":
            raise Conflict(f"the reward runner is {self._state}; create a new one")
        self._state = "running"
        outcomes: list[BaseException | None] = []
        try:
            starts = [*(p.start() for p in self._processes), self._models.start()]
            outcomes = await asyncio.gather(*starts, return_exceptions=True)
        finally:
            if len(outcomes) <= len(self._processes) or any(outcomes):
                await self.close()
        for outcome in outcomes:
            if isinstance(outcome, ProcessDied | ProcessTimeout):
                left_by_itself = isinstance(outcome, ProcessDied) and not outcome.by_signal
                raise (InvalidInput if left_by_itself else Unavailable)(
                    f"the process of the reward functions {outcome} while it loaded them"
                )
            if outcome is not None:
                raise outcome
        for process in self._processes:
            self._free.put_nowait(process)

    async def score(
        self,
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        columns: dict[str, list[Any]],
        trainer_state: Mapping[str, Any] | None = None,
    ) -> RewardResult:
        """Return the rewards of one group by every function in turn, or the first failure.

        prompts, completions, completion_ids and every column: one value for each of the C completions. `trainer_state`:
        see `paceline.reward.trainer_view`. Raises InvalidInput for different lengths or a value without a JSON form,
        Conflict if the runner does not run.
        """
        _check_lengths(prompts, completions, completion_ids, columns)
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        group = encode({"group": {**given, "columns": columns, "trainer_state": dict(trainer_state or {})}})
        self._check_running()
        process = await self._free.get()
        try:
            self._check_running()  # it may have been closed while this call waited
            return await self._score_in(process, group, prompts, completions)
        finally:
            self._free.put_nowait(process)

    async def close(self) -> None:
        """End all processes. Running calls end with a failure or Conflict."""
        self._state = "closed"
        await asyncio.gather(*(process.close() for process in self._processes), self._models.close())

    async def _score_in(
        self, process: RewardProcess, group: bytes, prompts: list[Any], completions: list[Any]
    ) -> RewardResult:
        num_completions, sent = len(completions), False
        rewards_CF: FloatArray = np.empty((num_completions, len(self._functions)), np.float32)
        durations_s: list[float] = []
        metrics: dict[str, tuple[float, int]] = {}
        extra: dict[str, list[Any]] = {}
        usage: dict[str, float] = {}
        failure = await self._revive(process)
        if self._state == "closed":  # while the process was being started, where close() could not see it
            await process.close()
            self._check_running()
        for index, function in enumerate(self._functions):
            if failure is not None:
                break
            started_s = time.monotonic()
            try:
                if index in self._models:
                    reply = await self._models.score(index, prompts, completions)
                else:
                    frames = [*([] if sent else [group]), encode({"call": index})]
                    sent = True
                    reply = await process.ask(*frames, timeout_s=function.timeout_s)
            except ProcessTimeout as error:
                kind: FailureKind = "unavailable" if error.starved else "timeout"
                failure = _failure(function, kind, f"{error}, its timeout_s")
            except ProcessDied as error:
                failure = _failure(function, "killed" if error.by_signal else "died", str(error))
            else:
                failure = _failure_in(function, reply)
                for name, value in checked_usage(reply.get("usage")).items():
                    usage[f"{name}/{function.label}"] = value
                if reply.get("out_of_memory"):
                    process.kill()
                if failure is None:
                    rewards_CF[:, index] = [np.nan if r is None else r for r in reply["rewards"]]
                    for name, (total, count) in checked_metrics(reply.get("metrics")).items():
                        before = metrics.get(name, (0.0, 0))
                        metrics[name] = (before[0] + total, before[1] + count)
                    for name, values in checked_extra(reply.get("extra"), num_completions).items():
                        if name in extra or len(extra) < MAX_COLUMNS:
                            extra[name] = values
            durations_s.append(time.monotonic() - started_s)
        return RewardResult(None if failure else rewards_CF, failure, tuple(durations_s), metrics, extra, usage)

    async def _revive(self, process: RewardProcess) -> RewardFailure | None:
        """Restart a process that a failure ended. The functions' file may be missing or broken by now."""
        if process.usable:
            return None
        try:
            await process.start()
        except (InvalidInput, ProcessDied, ProcessTimeout) as error:
            labels = ", ".join(function.label for function in self._functions)
            lasting = isinstance(error, InvalidInput) and not isinstance(error, Unreadable)
            return RewardFailure(
                labels,
                "died" if lasting else "unavailable",
                f"the process of {labels} could not be started again: {error}",
            )
        return None

    def _check_running(self) -> None:
        if self._state != "running":
            raise Conflict(f"the reward runner is {self._state}; it scores only between start and close")


def _failure(function: RewardFunctionSection, kind: FailureKind, what: str) -> RewardFailure:
    return RewardFailure(function.label, kind, f"reward function {function.label!r} {what}")


def _failure_in(function: RewardFunctionSection, reply: dict[str, Any]) -> RewardFailure | None:
    kinds: tuple[FailureKind, ...] = ("raised", "invalid", "unavailable")
    for kind in kinds:
        if kind in reply:
            return _failure(function, kind, str(reply[kind]))
    return None


def _check_lengths(
    prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], columns: dict[str, list[Any]]
) -> None:
    if not completions:
        raise InvalidInput("a group without completions cannot be scored")
    sized = {"prompts": prompts, "completion_ids": completion_ids, **columns}
    for name, values in sized.items():
        if len(values) != len(completions):
            raise InvalidInput(f"{name} has {len(values)} values for {len(completions)} completions")


class RewardProcess(UserProcess):
    """One child process with all functions of a run loaded, for one caller at a time."""

    def __init__(self, functions: Sequence[RewardFunctionSection], num_processes: int) -> None:
        """`num_processes` processes of the runner share the limits of services."""
        functions_to_load = [
            {
                "function": f.function,
                "label": f.label,
                "kwargs": f.kwargs,
                "memory_bytes": f.memory_mb << 20,
                "timeout_s": f.timeout_s,
            }
            for f in functions
        ]
        load = encode({"load": functions_to_load, "num_processes": num_processes})
        code = tuple(f.function.rpartition(":")[0] for f in functions)
        surroundings = Surroundings(code, service_variables(functions), runs_sandboxed_only(functions))
        super().__init__("paceline.reward.worker", load, START_TIMEOUT_S, surroundings)


def runs_sandboxed_only(functions: Sequence[RewardFunctionSection]) -> bool:
    """Return whether all functions are built-in, some run programs in a sandbox, and no sandbox may read further files."""
    has_programs = any(f.function == "code_tests" for f in functions)
    is_open = any(f.kwargs.get("sandbox") == "none" or f.kwargs.get("readable") for f in functions)
    return has_programs and not is_open and not any(":" in f.function for f in functions)


def service_variables(functions: Sequence[RewardFunctionSection]) -> tuple[str, ...]:
    """Return the environment variables with the keys of built-in functions' services."""
    found = []
    for kwargs in (f.kwargs for f in functions if ":" not in f.function):
        endpoint = kwargs.get("endpoint")
        key = endpoint.get("api_key_env") if isinstance(endpoint, Mapping) else None
        if isinstance(key, str) and key.endswith(KEY_VARIABLE):
            found.append(key)
        if kwargs.get("sandbox") == "remote":
            found.append(TOKEN_VARIABLE)
    return tuple(found)

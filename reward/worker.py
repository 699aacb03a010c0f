"""The process of reward functions: loads them once, then answers one call after another.

`paceline.reward.runner` starts it, documents the messages and enforces time limits by killing it. The promises of
`paceline.user_code.child` hold. This module never imports torch or transformers.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import socket
import traceback
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ALIKE, InvalidInput, Unreadable
from paceline.reward.calling import (
    InvalidRewards,
    RewardFunction,
    call_function,
    fails_always,
    form_hint,
    load_function,
)
from paceline.reward.trainer_view import CallView
from paceline.user_code.child import MemoryBudget, connect, is_out_of_memory, is_unreachable
from paceline.user_code.frames import encode, receive
from paceline.user_code.loading import describe_error


@dataclass
class LoadedFunction:
    function: RewardFunction
    path: Path | None
    kwargs: dict[str, Any]
    memory: MemoryBudget
    label: str
    timeout_s: float


def main() -> None:
    with connect() as connection, asyncio.Runner() as loop, contextlib.suppress(EOFError, ConnectionError):
        _serve(connection, loop)


def _serve(connection: socket.socket, loop: asyncio.Runner) -> None:
    try:
        load = receive(connection)
        functions = [_load(item) for item in load["load"]]
    except InvalidInput as error:
        connection.sendall(encode({"refused": str(error), "passing": isinstance(error, Unreadable)}))
        return
    connection.sendall(encode({"loaded": len(functions)}))
    group: dict[str, Any] = {}
    while True:
        message = receive(connection)
        if "group" in message:
            group = message["group"]
        else:
            connection.sendall(encode(_answer(functions[message["call"]], group, loop, load["num_processes"])))


def _load(item: dict[str, Any]) -> LoadedFunction:
    function = load_function(item["function"], item["kwargs"])
    path, colon, _ = item["function"].rpartition(":")
    own_file = Path(path).expanduser().resolve() if colon else None
    return LoadedFunction(
        function, own_file, item["kwargs"], MemoryBudget(item["memory_bytes"]), item["label"], item["timeout_s"]
    )


def _answer(loaded: LoadedFunction, group: dict[str, Any], loop: asyncio.Runner, num_processes: int) -> dict[str, Any]:
    """Return the reply to a call. Even if the call failed, the reply has the totals of its requests to services."""
    view = CallView(group.get("trainer_state"), loaded.label, loaded.timeout_s, num_processes)
    return {**_outcome(loaded, group, loop, view), "usage": view.usage}


def _outcome(loaded: LoadedFunction, group: dict[str, Any], loop: asyncio.Runner, view: CallView) -> dict[str, Any]:
    async def wait(awaitable: Awaitable[Any]) -> Any:
        return await awaitable

    copied = copy.deepcopy(group)  # a function may change its arguments, but not those of the next function
    try:
        with loaded.memory.limit():
            rewards = call_function(
                loaded.function, copied, loaded.kwargs, lambda awaitable: loop.run(wait(awaitable)), view
            )
        return {"rewards": rewards, "metrics": view.metrics, "extra": view.extra}
    except InvalidRewards as error:
        return {"invalid": f"{error}{ALIKE if fails_always(error, group['completions']) else ''}"}
    except BaseException as error:  # sys.exit() in a function is a failure too
        traceback.print_exc()
        description = describe_error(error, loaded.path)
        if is_unreachable(error):
            return {"unavailable": f"could not reach a service: {description}"}
        if is_out_of_memory(error):
            limit_mb = loaded.memory.memory_bytes >> 20
            return {"raised": f"ran out of memory, memory_mb is {limit_mb}: {description}", "out_of_memory": True}
        hint = form_hint(error, group["completions"])
        alike = ALIKE if fails_always(error, group["completions"]) else ""
        return {"raised": f"raised {description}{hint}{alike}", "out_of_memory": False}

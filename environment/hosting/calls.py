"""Calls of user code within its process: on the loop where they are coroutines, else on a thread that is the instance's.

An instance keeps its thread, because what it opened there (a database, a browser) often works on no other one. The service
sends one call at a time to a thread. Promises: whatever user code raises becomes a reply; a child that it forked never
answers.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from paceline.environment.hosting.values import InvalidValue
from paceline.errors import Unavailable
from paceline.user_code.child import is_out_of_memory, is_unreachable
from paceline.user_code.loading import describe_error

Reply = dict[str, Any]


class Lanes:
    """The threads of synchronous calls, by number."""

    def __init__(self) -> None:
        self._lanes: dict[int, ThreadPoolExecutor] = {}
        self._pid = os.getpid()

    async def run(self, lane: int | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what `function` returns: awaited, or run on a lane's thread; without a lane on a new one."""
        if inspect.iscoroutinefunction(function):
            result = await function(*args, **kwargs)
        else:
            result = await self._on_thread(lane, function, args, kwargs)
            if inspect.isawaitable(result):
                result = await result
        if os.getpid() != self._pid:
            os._exit(0)
        return result

    async def _on_thread(
        self, lane: int | None, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        def call() -> tuple[Any, BaseException | None]:
            try:
                value: Any = function(*args, **kwargs)
                failure: BaseException | None = None
            except BaseException as error:  # SystemExit would end the loop
                value, failure = None, error
            if os.getpid() != self._pid:
                os._exit(0)
            return value, failure

        if lane is None:
            future: Future[tuple[Any, BaseException | None]] = Future()
            threading.Thread(target=lambda: future.set_result(call()), daemon=True, name="agent").start()
            value, failure = await asyncio.wrap_future(future)
        else:
            if lane not in self._lanes:
                self._lanes[lane] = ThreadPoolExecutor(1, f"lane {lane}")
            value, failure = await asyncio.get_running_loop().run_in_executor(self._lanes[lane], call)
        if failure is not None:
            raise failure
        return value


def failure_reply(error: BaseException, memory_mb: int) -> Reply:
    """Return the reply to a call that raised."""
    if isinstance(error, InvalidValue):
        return {"failed": str(error)}
    traceback.print_exception(error)
    text = describe_error(error)
    if is_out_of_memory(error):
        return {"failed": f"ran out of memory, memory_mb is {memory_mb}: {text}", "out_of_memory": True}
    if isinstance(error, Unavailable) or is_unreachable(error):
        return {"unavailable": f"could not reach something: {text}"}
    return {"failed": f"raised {text}"}


def accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function takes: all of them where it has `**`, else those that it names. Raises InvalidValue
    where one that it needs is missing."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return arguments
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and parameter.default is parameter.empty
        and name not in arguments
    ]
    if missing:
        name = getattr(function, "__name__", "the function")
        raise InvalidValue(
            f"{name} needs {', '.join(missing)}, which is no column of the data set (columns: {', '.join(arguments)})"
        )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}

"""The process in which reward functions run: it loads them once, then answers one call after another.

`reward.process` starts it with one end of a socket pair. Promises: a function's output cannot get into the protocol, a
function cannot add more address space than its limit, and the process does not outlive the runner. The runner enforces
time limits by killing the process. This module never imports torch or transformers.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.error_texts import ALIKE
from paceline.errors import InvalidInput, Unreadable
from paceline.host.process import die_with_parent
from reward.calling import InvalidRewards, call_function, fails_always, form_hint
from reward.loading import RewardFunction, describe_error, load_function
from reward.protocol import encode, receive
from reward.trainer_view import CallView

MAX_LIMIT_BYTES = 2**62  # the most that setrlimit takes
OOM_SCORE = 500  # of 1000: when the host runs out of memory, the kernel kills this process before the service


@dataclass
class LoadedFunction:
    """A function with its arguments, and the address space that it has added so far."""

    function: RewardFunction
    path: Path | None
    kwargs: dict[str, Any]
    memory_bytes: int
    label: str
    timeout_s: float
    added_bytes: int = 0


def main() -> None:
    """Serve the socket whose descriptor is argv[2] until the runner, process argv[3], closes it."""
    connection_fd, runner_pid = int(sys.argv[2]), int(sys.argv[3])
    die_with_parent(
        runner_pid, signal.SIGKILL
    )  # on other systems than Linux, the closed socket ends an idle process
    _be_killed_first()
    _print_to_stderr()
    os.set_inheritable(connection_fd, False)
    connection = socket.socket(fileno=connection_fd)
    with connection, asyncio.Runner() as loop, contextlib.suppress(EOFError, ConnectionError):
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
            connection.sendall(
                encode(_answer(functions[message["call"]], group, loop, load["num_processes"]))
            )


def _load(item: dict[str, Any]) -> LoadedFunction:
    function = load_function(item["function"], item["kwargs"])
    path, colon, _ = item["function"].rpartition(":")
    own_file = Path(path).expanduser().resolve() if colon else None
    return LoadedFunction(
        function, own_file, item["kwargs"], item["memory_bytes"], item["label"], item["timeout_s"]
    )


def _answer(
    loaded: LoadedFunction, group: dict[str, Any], loop: asyncio.Runner, num_processes: int
) -> dict[str, Any]:
    """Return the reply to a call, with the sums of its requests to services also where it failed."""
    view = CallView(group.get("trainer_state"), loaded.label, loaded.timeout_s, num_processes)
    return {**_outcome(loaded, group, loop, view), "usage": view.usage}


def _outcome(
    loaded: LoadedFunction, group: dict[str, Any], loop: asyncio.Runner, view: CallView
) -> dict[str, Any]:
    async def wait(awaitable: Awaitable[Any]) -> Any:
        return await awaitable

    copied = copy.deepcopy(group)  # a function may change its arguments, but not those of the next one
    try:
        with _memory_limit(loaded):
            rewards = call_function(
                loaded.function, copied, loaded.kwargs, lambda awaitable: loop.run(wait(awaitable)), view
            )
        return {"rewards": rewards, "metrics": view.metrics, "extra": view.extra}
    except InvalidRewards as error:
        return {"invalid": f"{error}{ALIKE if fails_always(error, group['completions']) else ''}"}
    except BaseException as error:  # sys.exit() in a function is a failure too
        traceback.print_exc()
        description = describe_error(error, loaded.path)
        if _is_unreachable(error):
            return {"unavailable": f"could not reach something: {description}"}
        if _is_out_of_memory(error):
            limit_mb = loaded.memory_bytes >> 20
            return {
                "raised": f"ran out of memory, memory_mb is {limit_mb}: {description}",
                "out_of_memory": True,
            }
        hint = form_hint(error, group["completions"])
        alike = ALIKE if fails_always(error, group["completions"]) else ""
        return {"raised": f"raised {description}{hint}{alike}", "out_of_memory": False}


def _is_unreachable(error: BaseException | None) -> bool:
    """Return whether a failed connection is the cause: a fault of the called service, not of the function or the data."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
            return True
        seen.add(id(error))
        reason = getattr(error, "reason", None)  # urllib's URLError keeps the cause there
        error = reason if isinstance(reason, BaseException) else error.__cause__ or error.__context__
    return False


def _is_out_of_memory(error: BaseException) -> bool:
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and "allocate memory" in str(error))  # torch
    )


@contextlib.contextmanager
def _memory_limit(loaded: LoadedFunction) -> Iterator[None]:
    """Limit the address space that the function adds, over all its calls."""
    mapped_bytes = _mapped_bytes()
    if mapped_bytes is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit_bytes = min(mapped_bytes + max(0, loaded.memory_bytes - loaded.added_bytes), MAX_LIMIT_BYTES)
    if hard != resource.RLIM_INFINITY:
        limit_bytes = min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        loaded.added_bytes += (_mapped_bytes() or mapped_bytes) - mapped_bytes


def _mapped_bytes() -> int | None:
    """Return the address space of this process; None on other systems than Linux."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None


def _be_killed_first() -> None:
    """Let the kernel kill this process before the service when the host runs out of memory. Linux only."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))


def _print_to_stderr() -> None:
    """Redirect the functions' output, also below Python, to the service's log."""
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True, errors="backslashreplace")

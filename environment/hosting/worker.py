"""Runs environments and agents in a process: loads the user's code once, then answers many calls at a time.

`paceline.environment.hosting.pool` starts it. Messages, each with the `id` of its reply:

service → process   {"load": {"classes": {name: "file:Class"}, "tools": ["file:function"], "agent": "file:function", "train_call": "file:function",
                              "memory_mb": n, "lanes": n}}   once, first
                    {"op": "open", "instance": i, "class": name, "columns": {…}, "lane": k}   a new instance, and `reset`
                    {"op": "restore", "instance": i, "class": name, "state": text, "lane": k}   a new instance, and `load`
                    {"op": "tools", "instance": i, "calls": [[name, {…}]], "save": bool}
                    {"op": "step", "instance": i, "text": t, "save": bool}
                    {"op": "reward", "instance": i} | {"op": "close", "instance": i}
                    {"op": "solve", "row": {…}, "base_url": u, "api_key": k}
                    {"op": "train_call", "messages": […], "tools": […]}
                    {"op": "cancel", "call": id} | {"op": "ping"}
process → service   {"loaded": {name: facts}, "agent_on_loop": bool} | {"refused": text, "passing": bool}
                    {"id": n, "value": …, "state": text} | {"id": n, "failed": text, "out_of_memory": bool}
                    | {"id": n, "unavailable": text}

The promises of `paceline.user_code.child` hold. The service enforces time limits: a coroutine is cancelled, a hung
thread ends with the process. This module imports transformers for the schemas of tools, and never torch.

Coroutines run on the event loop. Other calls run on the thread of their instance, because resources that were opened
there (a database, a browser) often work on no other thread. The service sends one call at a time to a thread. Promises:
an exception of user code becomes a reply, every returned value is checked here, and a forked child never answers.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import importlib
import inspect
import json
import math
import os
import resource
import socket
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.environment.hosting.classes import (
    ClassFacts,
    NoEnvironment,
    facts_of,
    load_class,
    load_function,
    load_tools,
    schema_of,
)
from paceline.errors import InvalidInput, Unavailable, Unreadable, WireError
from paceline.user_code.box import why_refused
from paceline.user_code.child import MAX_LIMIT_BYTES, connect, is_out_of_memory, is_unreachable, mapped_bytes
from paceline.user_code.frames import encode, receive, receive_async
from paceline.user_code.loading import accepted_arguments, describe_error

M_ARENA_MAX = -8
"""Parameter of glibc's mallopt. A thread's arena reserves 64 MiB of address space, which the limit would count."""
STACK_BYTES = 8 << 20
"""Address space of a thread's stack, in bytes."""


def main() -> None:
    connection = connect()
    os.register_at_fork(after_in_child=connection.close)  # a forked child must not use the connection
    with connection, contextlib.suppress(EOFError, ConnectionError):
        try:
            host = Host(receive(connection)["load"])
        except InvalidInput as error:
            connection.sendall(encode({"refused": str(error), "passing": isinstance(error, Unreadable)}))
            return
        loaded = {name: facts._asdict() for name, facts in host.facts.items()}
        connection.sendall(encode({"loaded": loaded, "agent_on_loop": host.agent_on_loop}))
        asyncio.run(host.serve(connection))


@dataclass
class Instance:
    environment: Any
    lane: int
    facts: ClassFacts


class Host:
    def __init__(self, load: dict[str, Any]) -> None:
        """Load the user's code within its memory limit. Raises InvalidInput, Unreadable."""
        self._memory_mb = load["memory_mb"]
        if load["classes"]:  # before the limit, because it is not user code
            importlib.import_module("transformers.utils.chat_template_utils")
        _limit_memory((self._memory_mb << 20) + load["lanes"] * STACK_BYTES)
        try:
            self._classes = {
                name: load_class(named) if named else NoEnvironment for name, named in load["classes"].items()
            }
            self.facts: dict[str, ClassFacts] = {name: facts_of(cls) for name, cls in self._classes.items()}
            self._tools = load_tools(load["tools"], self.facts.values())
            shared = [schema_of(tool, f"environment.tools: {name!r}") for name, tool in self._tools.items()]
            self.facts = {name: facts._replace(tools=[*facts.tools, *shared]) for name, facts in self.facts.items()}
            self._agent = load["agent"] and load_function(load["agent"], "environment.agent", "agent function")
            self._train_call = load["train_call"] and load_function(
                load["train_call"], "environment.train_call", "train_call function"
            )
        except MemoryError as error:
            raise InvalidInput(
                f"the environment's code needs more memory to load than environment.memory_mb={self._memory_mb}: {error}"
            ) from None
        self.agent_on_loop = inspect.iscoroutinefunction(self._agent)
        self._instances: dict[str, Instance] = {}
        self._lanes = Lanes()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self, connection: socket.socket) -> None:
        """Answer calls until the connection ends."""
        reader, writer = await asyncio.open_connection(sock=connection)
        with contextlib.suppress(EOFError, OSError, WireError):
            while True:
                message = await receive_async(reader)
                match message["op"]:
                    case "ping":
                        writer.write(encode({"id": message["id"], "value": None}))
                    case "cancel":
                        if task := self._tasks.get(message["call"]):
                            task.cancel()
                        writer.write(encode({"id": message["id"], "value": None}))
                    case "close":
                        self._instances.pop(message["instance"], None)
                        writer.write(encode({"id": message["id"], "value": None}))
                    case _:
                        task = asyncio.create_task(self._answer(message, writer))
                        self._tasks[message["id"]] = task
        os._exit(0)  # because threads of user code would delay the end

    async def _answer(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        reply: Reply
        try:
            reply = await self._call(message)
        except asyncio.CancelledError:
            reply = {"failed": "was cancelled"}
        except BaseException as error:  # also sys.exit() in user code
            reply = failure_reply(error, self._memory_mb)
        finally:
            del self._tasks[message["id"]]
        try:
            frame = encode({"id": message["id"], **reply})
        except (InvalidInput, RecursionError, MemoryError) as error:
            frame = encode(
                {"id": message["id"], "failed": f"returned a value that cannot be written as JSON: {error}"[:2000]}
            )
        writer.write(frame)

    async def _call(self, message: dict[str, Any]) -> Reply:
        match message["op"]:
            case "open":
                return {"value": await self._open(message)}
            case "restore":
                instance = await self._new(message)
                await self._lanes.run(instance.lane, instance.environment.load, decode_state(message["state"]))
                return {"value": None}
            case "tools":
                instance = self._instances[message["instance"]]
                tools = [tool["function"]["name"] for tool in instance.facts.tools]
                results = [await self._use(instance, tools, *call) for call in message["calls"]]
                return {"value": results, **await self._state(message, instance)}
            case "step":
                instance = self._instances[message["instance"]]
                step = step_of(await self._lanes.run(instance.lane, instance.environment.step, message["text"]))
                return {"value": step._asdict(), **await self._state(message, instance)}
            case "reward":
                instance = self._instances[message["instance"]]
                reward = await self._lanes.run(instance.lane, instance.environment.get_reward)
                return {"value": reward_of(reward, "get_reward")}
            case "solve":
                arguments = (message["row"], message["base_url"], message["api_key"])
                return {"value": reward_of(await self._lanes.run(None, self._agent, *arguments), "the agent")}
            case _:
                trains = await self._lanes.run(0, self._train_call, message["messages"], message["tools"])
                if not isinstance(trains, bool):
                    raise InvalidValue(f"train_call returned {type(trains).__name__}; it must return True or False")
                return {"value": trains}

    async def _open(self, message: dict[str, Any]) -> str | None:
        instance = await self._new(message)
        arguments = accepted(instance.environment.reset, message["columns"])
        return text_of_reset(await self._lanes.run(instance.lane, instance.environment.reset, **arguments))

    async def _new(self, message: dict[str, Any]) -> Instance:
        name, lane = message["class"], message["lane"]
        instance = Instance(await self._lanes.run(lane, self._classes[name]), lane, self.facts[name])
        self._instances[message["instance"]] = instance
        return instance

    async def _use(self, instance: Instance, tools: list[str], name: str, arguments: Any) -> dict[str, Any]:
        """Return the result of a tool call. An exception of a tool becomes its result, as in TRL, because the model can
        learn from it; out of memory and an unavailable service are raised."""
        try:
            if name not in tools:
                raise ValueError(f"Tool {name} not found.")
            if not isinstance(arguments, dict):
                raise ValueError(f"The arguments of {name} must be an object.")
            tool = self._tools.get(name) or getattr(instance.environment, name)
            result = await self._lanes.run(instance.lane, tool, **arguments)
            return {"result": text_of_tool(result)}
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, Unavailable):
                raise
            return {"result": text_of_tool({"error": f"{error}{why_refused(error)}"}), "raised": True}

    async def _state(self, message: dict[str, Any], instance: Instance) -> Reply:
        if not message["save"]:
            return {}
        return {"state": encode_state(await self._lanes.run(instance.lane, instance.environment.save))}


def _limit_memory(added_bytes: int) -> None:
    """Limit this process to `added_bytes` more mapped memory than now. Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)
    mapped = mapped_bytes()
    if mapped is None:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = min(mapped + added_bytes, MAX_LIMIT_BYTES)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


Reply = dict[str, Any]


class Lanes:
    def __init__(self) -> None:
        self._lanes: dict[int, ThreadPoolExecutor] = {}
        self._pid = os.getpid()

    async def run(self, lane: int | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Await `function`, or run it on the lane's thread (lane None: on a new thread), and return its result."""
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
            except BaseException as error:  # SystemExit would end the event loop
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
    if isinstance(error, InvalidValue):
        return {"failed": str(error)}
    traceback.print_exception(error)
    text = describe_error(error)
    if is_out_of_memory(error):
        return {"failed": f"ran out of memory, memory_mb is {memory_mb}: {text}", "out_of_memory": True}
    if isinstance(error, Unavailable) or is_unreachable(error):
        return {"unavailable": f"could not reach a service: {text}"}
    return {"failed": f"raised {text}"}


def accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function accepts. Raises InvalidValue if a required one is missing."""
    found, missing = accepted_arguments(function, arguments)
    if missing:
        name = getattr(function, "__name__", "the function")
        raise InvalidValue(
            f"{name} needs {', '.join(missing)}, but the data set has no such column (columns: {', '.join(arguments)})"
        )
    return found


MAX_TEXT_CHARS = 4 << 20
"""Largest number of characters of a text for the service, which then cuts the text to a number of tokens."""
MAX_STATE_BYTES = 8 << 20


class InvalidValue(Exception):
    """User code returned a value that its contract does not allow."""


class Step(NamedTuple):
    observation: str
    reward: float | None
    done: bool


def text_of_tool(result: Any) -> str:
    """Return a tool's result as TRL writes it into the conversation: `str(result)`."""
    return str(result)[:MAX_TEXT_CHARS]


def text_of_reset(result: Any) -> str | None:
    """Return the text that `reset` adds to the prompt. gym's `(observation, info)` is accepted too."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
        result = result[0]
    if result is None:
        return None
    if isinstance(result, list) and all(_is_text_part(part) for part in result):
        result = "".join(part["text"] for part in result)
    if not isinstance(result, str):
        raise InvalidValue(f"reset returned {short(result)}; it must return text or None")
    return result[:MAX_TEXT_CHARS]


def step_of(result: Any) -> Step:
    """Return `step`'s result: (observation, reward, done), gym's five, or a dict (`observations`, `reward`, `done`)."""
    if isinstance(result, dict) and {"observations", "reward", "done"} <= result.keys():
        observed = result["observations"]
        if isinstance(observed, list):
            observed = "\n\n".join(
                str(each.get("content", "")) if isinstance(each, dict) else str(each) for each in observed
            )
        result = (observed, result["reward"], result["done"])
    elif isinstance(result, tuple) and len(result) == 5:
        result = (result[0], result[1], bool(result[2]) or bool(result[3]))
    if not isinstance(result, tuple | list) or len(result) != 3:
        raise InvalidValue(f"step returned {short(result)}; it must return (observation, reward, done)")
    observation, reward, done = result
    if observation is None:
        observation = ""
    if not isinstance(observation, str):
        raise InvalidValue(f"step returned the observation {short(observation)}; it must be text")
    if not isinstance(_plain(done), bool):
        raise InvalidValue(f"step returned {short(done)} as `done`; it must be True or False")
    return Step(observation[:MAX_TEXT_CHARS], reward_of(reward, "step"), bool(done))


def reward_of(value: Any, source: str) -> float | None:
    """Return a reward: a finite number or None. `source` is the function that returned it."""
    value = _plain(value)
    if value is None:
        return None
    if not isinstance(value, bool | int | float):
        raise InvalidValue(f"{source} returned the reward {short(value)}; it must be a number or None")
    number = float(value)
    if not math.isfinite(number) or abs(number) > 3.4028234663852886e38:
        raise InvalidValue(f"{source} returned the reward {number}; it must be finite")
    return number


def encode_state(state: Any) -> str:
    """Return the state of `save` as text. It must be bytes or a JSON value."""
    if isinstance(state, bytes | bytearray):
        text = "b" + base64.b64encode(state).decode()
    else:
        try:
            text = "j" + json.dumps(state)
        except (TypeError, ValueError) as error:
            raise InvalidValue(f"save returned {short(state)}; it must return bytes or JSON: {error}") from None
    if len(text) > MAX_STATE_BYTES:
        raise InvalidValue(f"save returned {len(text)} bytes, but at most {MAX_STATE_BYTES} are kept for a turn")
    return text


def decode_state(text: str) -> Any:
    return base64.b64decode(text[1:]) if text.startswith("b") else json.loads(text[1:])


def short(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:60]}"


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _plain(value: Any) -> Any:
    item = getattr(value, "item", None)  # unpacks scalars of NumPy and torch without importing either
    if item is None:
        return value
    try:
        return item()
    except (TypeError, ValueError, RuntimeError):
        return value

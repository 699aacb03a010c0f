"""Runs the user code of a run in processes and limits each call.

Promises: user code that raises, hangs, forks, exhausts memory or returns nonsense fails its own episode, with a message
about the cause. Other episodes of the process continue, or are `EnvironmentLost` if the process has ended. Waiting for
a lane or a process does not count against a call's limit.

A slot is one process with its episodes, started once. If one of its threads hangs, the slot is retired: it takes no
further episodes and ends with the last one that it has. If its process dies, a new slot replaces it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from paceline.environment.hosting.classes import ClassFacts
from paceline.environment.protocols import EnvironmentFailed, EnvironmentLost, ServiceAway, TimeIsUp
from paceline.errors import Conflict, InvalidInput, Unavailable, Unreadable
from paceline.host.resources import usable_cores
from paceline.spec.reading import file_of
from paceline.spec.sections.user_code import EnvironmentSection
from paceline.user_code.ends import ProcessDied, ProcessTimeout, starved_seconds, usage
from paceline.user_code.process import SharedProcess
from paceline.user_code.surroundings import Surroundings

START_TIMEOUT_S = 300.0
MAX_DEATHS = 3
"""An episode fails at this number of process deaths during its calls."""
log = logging.getLogger(__name__)


class UserCode:
    """Runs the user code of a run. An async context manager."""

    def __init__(self, section: EnvironmentSection, num_processes: int = 0):
        """Use `num_processes` processes; 0 means `environment.processes`, or if that is 0 too, one for each core. A
        command line needs processes only for `train_call`."""
        self.section = section
        needs_none = bool(section.command) and not section.train_call
        count = num_processes or section.processes or usable_cores()
        self._load = {
            "classes": dict(section.classes) if section.has_class else {},
            "tools": list(section.tools),
            "agent": section.agent,
            "train_call": section.train_call,
            "memory_mb": section.memory_mb,
            "lanes": section.parallel_calls,
        }
        self._slots = [Slot(self._load, section.parallel_calls) for _ in range(0 if needs_none else count)]
        self._left: set[Slot] = set()
        """Retired slots that still have episodes."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._locks = [asyncio.Lock() for _ in self._slots]
        self._state = "new"
        self._instance_numbers = itertools.count(1)
        self.classes: Mapping[str, ClassFacts] = {}
        """Properties of the classes by name; a single class has the empty name."""
        self._agent_on_loop = True

    async def __aenter__(self) -> UserCode:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the processes. Raises InvalidInput if the code cannot be loaded, Unreadable if a later attempt may load
        it, and Unavailable if a process was killed or took too long. After an error no process runs."""
        if self._state != "new":
            raise Conflict(f"the processes of the user code are {self._state}; create a new UserCode")
        self._state = "running"
        outcomes = await asyncio.gather(*(self._start(slot) for slot in self._slots), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                await self.close()
                raise outcome

    async def close(self) -> None:
        self._state = "closed"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(slot.process.close() for slot in [*self._slots, *self._left]))

    async def open(
        self, name: str, columns: Mapping[str, Any], time_left_s: float, deaths: SampleDeaths
    ) -> tuple[Instance, str | None]:
        """Return a new instance and the text of its `reset`. Raises EpisodeFault, InvalidInput for an unknown class."""
        instance = await self._instance(name, deaths)
        text = await self._first(instance, {"op": "open", "columns": dict(columns)}, "reset", time_left_s)
        return instance, text

    async def restore(self, name: str, state: str, time_left_s: float, deaths: SampleDeaths) -> Instance:
        """Return a new instance of a class, with the state that `save` returned. Raises EpisodeFault."""
        instance = await self._instance(name, deaths)
        await self._first(instance, {"op": "restore", "state": state}, "load", time_left_s)
        return instance

    async def solve(self, row: Mapping[str, Any], base_url: str, api_key: str, deaths: SampleDeaths) -> float | None:
        """Run the agent and return its reward. If this call is cancelled, an agent that is a coroutine is cancelled
        too; an agent in a thread continues until its process ends. Raises EnvironmentFailed, EnvironmentLost."""
        slot = await self._slot()
        lane = slot.enter()
        message = {"op": "solve", "row": dict(row), "base_url": base_url, "api_key": api_key}
        try:
            async with slot.calls:
                reply = await _call(self, slot, message, "the agent", None, deaths, None)
                reward: float | None = reply["value"]
                return reward
        except asyncio.CancelledError:
            # The thread of a cancelled agent runs on until its process ends.
            slot.retired = slot.retired or not self._agent_on_loop
            raise
        finally:
            slot.leave(lane)

    async def trains(self, messages: list[Any], tools: list[Any], deaths: SampleDeaths) -> bool:
        """Return whether `train_call` lets a request be trained. Raises EnvironmentFailed, EnvironmentLost."""
        slot = await self._slot()
        message = {"op": "train_call", "messages": messages, "tools": tools}
        async with slot.lanes[0]:
            limit_s = self.section.call_timeout_s
            trains: bool = (await _call(self, slot, message, "train_call", limit_s, deaths, 0))["value"]
        return trains

    async def _instance(self, name: str, deaths: SampleDeaths) -> Instance:
        if name not in self.classes:
            named = ", ".join(map(repr, self.classes))
            raise InvalidInput(f"the column 'environment' is {name!r}, but environment.class has only {named}")
        slot = await self._slot()
        return Instance(self, slot, f"{next(self._instance_numbers)}", name, deaths)

    async def _first(self, instance: Instance, message: dict[str, Any], method: str, time_left_s: float) -> Any:
        try:
            message |= {"class": instance.name, "lane": instance.lane}
            return (await instance.call(message, [method], time_left_s))["value"]
        except BaseException:
            instance.close()
            raise

    async def _slot(self) -> Slot:
        """Return a running slot with the fewest episodes. A retired slot or one without a process is replaced first."""
        if self._state != "running":
            raise EnvironmentLost(f"the processes of the user code are {self._state}")
        index = min(range(len(self._slots)), key=lambda i: 0 if self._stale(i) else self._slots[i].num_episodes)
        async with self._locks[index]:
            if self._stale(index):
                slot = Slot(self._load, self.section.parallel_calls)
                await self._restart(slot)
                old, self._slots[index] = self._slots[index], slot
                self._left.add(old)
                self._in_background(self._end(old))
            return self._slots[index]

    def check(self, slot: Slot) -> None:
        """Check in the background whether a process still answers after one of its calls was cancelled; kill it if
        not."""
        if slot.process.usable and self._state == "running":
            self._in_background(slot.answers())

    async def _end(self, slot: Slot) -> None:
        if slot.process.usable:
            await slot.emptied.wait()  # no deadline: each episode has its own
        await slot.process.close()
        self._left.discard(slot)

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _stale(self, index: int) -> bool:
        return self._slots[index].retired or not self._slots[index].process.usable

    async def _restart(self, slot: Slot) -> None:
        try:
            await self._start(slot)
        except (InvalidInput, Unavailable) as error:
            # The code was loaded before, so its file has changed or the host is at its limits.
            raise ServiceAway(f"the process of the environment could not be started again: {error}") from None
        if self._state != "running":
            await slot.process.close()
            raise EnvironmentLost("the processes of the user code are closed")

    async def _start(self, slot: Slot) -> None:
        try:
            reply = await slot.process.start(START_TIMEOUT_S)
        except (ProcessDied, ProcessTimeout) as error:
            by_itself = isinstance(error, ProcessDied) and not error.by_signal
            raise (InvalidInput if by_itself else Unavailable)(
                f"the process of the environment {error} while it loaded the code"
            ) from None
        if "refused" in reply:
            await slot.process.close()
            raise (Unreadable if reply.get("passing") else InvalidInput)(str(reply["refused"]))
        self.classes = {name: ClassFacts(**facts) for name, facts in reply["loaded"].items()}
        self._agent_on_loop = bool(reply["agent_on_loop"])


class SampleDeaths:
    def __init__(self) -> None:
        self.count = 0


class Instance:
    """The environment of one episode, for one caller at a time."""

    def __init__(self, code: UserCode, slot: Slot, number: str, name: str, deaths: SampleDeaths) -> None:
        self._code, self._slot, self._number, self._deaths = code, slot, number, deaths
        self.name, self.facts = name, code.classes[name]
        self.lane = slot.enter()
        self._open = True

    async def tools(self, calls: list[tuple[str, Any]], time_left_s: float) -> tuple[list[dict[str, Any]], str]:
        """Return the result of each tool call, in order, and the state. Raises EpisodeFault."""
        message = {"op": "tools", "calls": calls, "save": self.facts.saves}
        reply = await self.call(message, [name for name, _ in calls], time_left_s)
        return reply["value"], reply.get("state", "")

    async def step(self, text: str, time_left_s: float) -> tuple[dict[str, Any], str]:
        """Return the observation, reward and end from `step`, and the state. Raises EpisodeFault."""
        reply = await self.call({"op": "step", "text": text, "save": self.facts.saves}, ["step"], time_left_s)
        return reply["value"], reply.get("state", "")

    async def reward(self, time_left_s: float) -> float | None:
        """Return the reward of `get_reward`; None if the class does not have it. Raises EpisodeFault."""
        if not self.facts.rewards:
            return None
        reward: float | None = (await self.call({"op": "reward"}, ["get_reward"], time_left_s))["value"]
        return reward

    async def call(self, message: dict[str, Any], methods: list[str], time_left_s: float) -> dict[str, Any]:
        """Send a message about this instance and return the reply. `methods` are run one after another."""
        message = {"instance": self._number, **message}
        saves = ["save"] if message.get("save") else []
        on_loop = all(name in self.facts.asynchronous for name in [*methods, *saves]) and message["op"] != "open"
        lock: AbstractAsyncContextManager[Any] = self._slot.calls if on_loop else self._slot.lanes[self.lane]
        if self.lane in self._slot.hung:
            raise EnvironmentLost("the thread of the environment hangs in a call of another episode")
        async with lock:
            if self.lane in self._slot.hung:
                raise EnvironmentLost("the thread of the environment hangs in a call of another episode")
            limit_s = self._code.section.call_timeout_s * max(1, len(methods))
            what = ", ".join(dict.fromkeys(methods)) or "the environment"
            try:
                lane = None if on_loop else self.lane
                return await _call(self._code, self._slot, message, what, min(limit_s, time_left_s), self._deaths, lane)
            except EnvironmentFailed as error:
                if time_left_s < limit_s and isinstance(error.__cause__, ProcessTimeout):
                    raise TimeIsUp(f"the episode's time limit passed while {what} ran") from None
                raise

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        if self._slot.process.usable:
            self._slot.process.send({"op": "close", "instance": self._number})
        self._slot.leave(self.lane)


async def _call(
    code: UserCode,
    slot: Slot,
    message: dict[str, Any],
    what: str,
    limit_s: float | None,
    deaths: SampleDeaths,
    lane: int | None,
) -> dict[str, Any]:
    """Return the reply to a call of user code. Raises EnvironmentFailed, EnvironmentLost, ServiceAway."""
    if not slot.process.usable:
        raise EnvironmentLost("the process of the environment has ended")
    slot.num_calls += 1
    number, half = slot.process.last_id + 1, None
    used_s: list[float] = []
    # Measured at half of the time only, because it reads all processes of the machine.
    if limit_s is not None:
        loop = asyncio.get_running_loop()
        half = loop.call_later(limit_s / 2, lambda: used_s.append(usage(slot.process.pid or 0)))
    try:
        reply = await slot.process.ask(message, limit_s)
    except ProcessTimeout as error:
        raise await _timed_out(slot, number, what, sum(used_s), limit_s or 0.0, lane) from error
    except ProcessDied as died:
        raise _died(slot, what, died, deaths) from died
    except asyncio.CancelledError:
        slot.process.send({"op": "cancel", "call": number})
        code.check(slot)
        raise
    finally:
        slot.num_calls -= 1
        if half is not None:
            half.cancel()
    if reply.get("out_of_memory"):
        slot.kill()
    if "unavailable" in reply:
        raise ServiceAway(f"{what} {reply['unavailable']}")
    if "failed" in reply:
        raise EnvironmentFailed(f"{what} {reply['failed']}")
    return reply


async def _timed_out(
    slot: Slot, number: int, what: str, used_s: float, limit_s: float, lane: int | None
) -> EnvironmentFailed | EnvironmentLost:
    pid = slot.process.pid
    starved = pid is not None and starved_seconds(pid, used_s, limit_s / 2) is not None
    slot.process.send({"op": "cancel", "call": number})
    if await slot.answers() and lane is not None:
        slot.retired = True
        slot.hung.add(lane)
    if starved:
        return EnvironmentLost(f"{what} got no processor time within {limit_s:g} s")
    return EnvironmentFailed(f"{what} timed out after {limit_s:g} s")


def _died(slot: Slot, what: str, died: ProcessDied, deaths: SampleDeaths) -> EnvironmentFailed | EnvironmentLost:
    if slot.killed:
        return EnvironmentLost(f"the process was killed because of another episode while {what} ran")
    deaths.count += 1
    alone = slot.num_calls == 1  # this call, which is subtracted later
    if deaths.count >= MAX_DEATHS or (alone and not died.by_signal):
        return EnvironmentFailed(f"{what}: the process {died}")
    return EnvironmentLost(f"the process {died} while {what} ran")


PING_S = 5.0
"""Seconds after which a process without an answer counts as hung: it is stopped, or user code holds the interpreter's
lock."""


class Slot:
    def __init__(self, load: dict[str, Any], num_lanes: int) -> None:
        named = [*load["classes"].values(), *load["tools"], load["agent"], load["train_call"]]
        surroundings = Surroundings(tuple(file_of(code) for code in named if code))
        self.process = SharedProcess("paceline.environment.hosting.worker", {"load": load}, surroundings)
        self.num_episodes = 0
        self.retired = False
        self.killed = False
        """True if the pool killed the process because of one of its calls."""
        self.emptied = asyncio.Event()
        """Event that is set while the slot has no episode."""
        self.emptied.set()
        self.num_calls = 0
        self.calls = asyncio.Semaphore(num_lanes)
        """Limits concurrent coroutines; `lanes` limit synchronous calls."""
        self.lanes = [asyncio.Lock() for _ in range(num_lanes)]
        """Lanes, each for one synchronous call at a time."""
        self._lane_episodes = [0] * num_lanes
        self.hung: set[int] = set()
        """Lanes with a hung thread, whose episodes are lost."""

    def enter(self) -> int:
        self.num_episodes += 1
        self.emptied.clear()
        lane = min(range(len(self.lanes)), key=self._lane_episodes.__getitem__)
        self._lane_episodes[lane] += 1
        return lane

    def leave(self, lane: int) -> None:
        self.num_episodes -= 1
        self._lane_episodes[lane] -= 1
        if not self.num_episodes:
            self.emptied.set()
            if self.retired:
                self.process.kill()

    def kill(self) -> None:
        """Kill the process because of one of its calls. Its other episodes are lost but have not failed."""
        self.killed = True
        self.process.kill()

    async def answers(self) -> bool:
        """Return whether the process answers within PING_S; kill it if not."""
        try:
            await self.process.ask({"op": "ping"}, PING_S)
        except ProcessTimeout:
            self.kill()
            return False
        except ProcessDied:
            return False
        return True

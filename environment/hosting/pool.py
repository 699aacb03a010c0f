"""`UserCode`: the processes in which the environments and agents of a run live, and calls of them with limits.

Promises: user code that raises, hangs, forks, eats memory or returns nonsense fails its own episode with a message that says
what it did; episodes beside it in the process go on, or are `EnvironmentLost` when the process is gone. Waiting for a lane or
a process does not count against a call's limit.

A slot, one process with its episodes, is started once. When a thread of it hangs it is retired: it takes no further episodes, those in it go on, and it ends
with the last of them. When its process dies, a new slot takes its place.
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
"""Deaths of processes at which a call of one and the same episode was running before they count as its own fault."""
log = logging.getLogger(__name__)


class UserCode:
    """The user code of a run; an async context manager."""

    def __init__(self, section: EnvironmentSection, num_processes: int = 0):
        """Set the code; `start` starts the processes. num_processes: 0 takes `environment.processes`, and with 0 there too as
        many as cores. A command line needs none, but for `train_call`."""
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
        """Retired slots with episodes."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._locks = [asyncio.Lock() for _ in self._slots]
        self._state = "new"
        self._sessions = itertools.count(1)
        self.classes: Mapping[str, ClassFacts] = {}
        """Facts of the classes by name; a single class has the empty name."""
        self._agent_on_loop = True

    async def __aenter__(self) -> UserCode:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the processes. Raises InvalidInput when the code cannot be loaded (Unreadable: not now), Unavailable when a
        process was killed or took too long; none runs then."""
        if self._state != "new":
            raise Conflict(f"the user code is {self._state}; make a new one")
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
        """Return a new instance of a class, and the text of its `reset`. Raises EpisodeFault, InvalidInput for an unknown
        class."""
        instance = await self._instance(name, deaths)
        text = await self._first(instance, {"op": "open", "columns": dict(columns)}, "reset", time_left_s)
        return instance, text

    async def restore(self, name: str, state: str, time_left_s: float, deaths: SampleDeaths) -> Instance:
        """Return a new instance of a class with the state of its `save`. Raises EpisodeFault."""
        instance = await self._instance(name, deaths)
        await self._first(instance, {"op": "restore", "state": state}, "load", time_left_s)
        return instance

    async def solve(self, row: Mapping[str, Any], base_url: str, api_key: str, deaths: SampleDeaths) -> float | None:
        """Run the agent and return its reward. Cancelling cancels a coroutine; a thread ends with its process. Raises
        EnvironmentFailed, EnvironmentLost."""
        slot = await self._slot()
        lane = slot.enter()
        message = {"op": "solve", "row": dict(row), "base_url": base_url, "api_key": api_key}
        try:
            async with slot.calls:
                reply = await _call(self, slot, message, "the agent", None, deaths, None)
                reward: float | None = reply["value"]
                return reward
        except asyncio.CancelledError:
            # A thread of an agent that was cancelled goes on until its process ends.
            slot.retired = slot.retired or not self._agent_on_loop
            raise
        finally:
            slot.leave(lane)

    async def trains(self, messages: list[Any], tools: list[Any], deaths: SampleDeaths) -> bool:
        """Return whether `train_call` wants a request to be trained. Raises EnvironmentFailed, EnvironmentLost."""
        slot = await self._slot()
        message = {"op": "train_call", "messages": messages, "tools": tools}
        async with slot.lanes[0]:
            limit_s = self.section.call_timeout_s
            trains: bool = (await _call(self, slot, message, "train_call", limit_s, deaths, 0))["value"]
        return trains

    async def _instance(self, name: str, deaths: SampleDeaths) -> Instance:
        if name not in self.classes:
            named = ", ".join(map(repr, self.classes))
            raise InvalidInput(
                f"the row's column 'environment' is {name!r}, which environment.class does not have; it has {named}"
            )
        slot = await self._slot()
        return Instance(self, slot, f"{next(self._sessions)}", name, deaths)

    async def _first(self, instance: Instance, message: dict[str, Any], method: str, time_left_s: float) -> Any:
        try:
            message |= {"class": instance.name, "lane": instance.lane}
            return (await instance.call(message, [method], time_left_s))["value"]
        except BaseException:
            instance.close()
            raise

    async def _slot(self) -> Slot:
        """Return a running slot with the fewest episodes; one whose process is gone, or that was retired, is replaced."""
        if self._state != "running":
            raise EnvironmentLost(f"the user code is {self._state}")
        index = min(range(len(self._slots)), key=lambda i: 0 if self._stale(i) else self._slots[i].num_sessions)
        async with self._locks[index]:
            if self._stale(index):
                slot = Slot(self._load, self.section.parallel_calls)
                await self._restart(slot)
                old, self._slots[index] = self._slots[index], slot
                self._left.add(old)
                self._in_background(self._end(old))
            return self._slots[index]

    def check(self, slot: Slot) -> None:
        """Find out in the background whether a process still answers after one of its calls was cancelled."""
        if slot.process.usable and self._state == "running":
            self._in_background(slot.answers())

    async def _end(self, slot: Slot) -> None:
        """End a slot that was replaced, once its last episode is gone."""
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
            # It was loaded before, so its file changed or the host is at its limits.
            raise ServiceAway(f"the process of the environment could not be started again: {error}") from None
        if self._state != "running":
            await slot.process.close()
            raise EnvironmentLost("the user code is closed")

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
    """Deaths of processes at which a call of one sample was running."""

    def __init__(self) -> None:
        self.count = 0


class Instance:
    """The environment of one episode. Used by one caller at a time; `close` lets it go."""

    def __init__(self, code: UserCode, slot: Slot, session: str, name: str, deaths: SampleDeaths) -> None:
        self._code, self._slot, self._session, self._deaths = code, slot, session, deaths
        self.name, self.facts = name, code.classes[name]
        self.lane = slot.enter()
        self._open = True

    async def tools(self, calls: list[tuple[str, Any]], time_left_s: float) -> tuple[list[dict[str, Any]], str]:
        """Return the result of each tool call, in order, and the state. Raises EpisodeFault."""
        message = {"op": "tools", "calls": calls, "save": self.facts.saves}
        reply = await self.call(message, [name for name, _ in calls], time_left_s)
        return reply["value"], reply.get("state", "")

    async def step(self, text: str, time_left_s: float) -> tuple[dict[str, Any], str]:
        """Return the outcome of `step`, and the state. Raises EpisodeFault."""
        reply = await self.call({"op": "step", "text": text, "save": self.facts.saves}, ["step"], time_left_s)
        return reply["value"], reply.get("state", "")

    async def reward(self, time_left_s: float) -> float | None:
        """Return the reward of `get_reward`; None where the class has none. Raises EpisodeFault."""
        if not self.facts.rewards:
            return None
        reward: float | None = (await self.call({"op": "reward"}, ["get_reward"], time_left_s))["value"]
        return reward

    async def call(self, message: dict[str, Any], methods: list[str], time_left_s: float) -> dict[str, Any]:
        """Send a message about this instance and return the reply. `methods` run one after another."""
        message = {"session": self._session, **message}
        saves = ["save"] if message.get("save") else []
        on_loop = all(name in self.facts.asynchronous for name in [*methods, *saves]) and message["op"] != "open"
        lock: AbstractAsyncContextManager[Any] = self._slot.calls if on_loop else self._slot.lanes[self.lane]
        if self.lane in self._slot.hung:
            raise EnvironmentLost("the thread of the environment hangs in another episode's call")
        async with lock:
            if self.lane in self._slot.hung:
                raise EnvironmentLost("the thread of the environment hangs in another episode's call")
            limit_s = self._code.section.call_timeout_s * max(1, len(methods))
            what = ", ".join(dict.fromkeys(methods)) or "the environment"
            try:
                lane = None if on_loop else self.lane
                return await _call(self._code, self._slot, message, what, min(limit_s, time_left_s), self._deaths, lane)
            except EnvironmentFailed as error:
                if time_left_s < limit_s and isinstance(error.__cause__, ProcessTimeout):
                    raise TimeIsUp(f"the time was over while {what} ran") from None
                raise

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        if self._slot.process.usable:
            self._slot.process.send({"op": "close", "session": self._session})
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
        raise EnvironmentLost("the process of the environment is gone")
    slot.num_calls += 1
    number, half = slot.process.last_id + 1, None
    used_s: list[float] = []
    # At half of the time, because the measurement reads all processes of the machine.
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
        return EnvironmentLost(f"{what} got no processor within {limit_s:g} s")
    return EnvironmentFailed(f"{what} timed out after {limit_s:g} s")


def _died(slot: Slot, what: str, died: ProcessDied, deaths: SampleDeaths) -> EnvironmentFailed | EnvironmentLost:
    if slot.killed:
        return EnvironmentLost(f"the process was killed for another episode's call while {what} ran")
    deaths.count += 1
    alone = slot.num_calls == 1  # this call; it is taken off behind
    if deaths.count >= MAX_DEATHS or (alone and not died.by_signal):
        return EnvironmentFailed(f"{what}: the process {died}")
    return EnvironmentLost(f"the process {died} while {what} ran")


PING_S = 5.0
"""A process that does not answer this long is hung as a whole: user code holds the interpreter, or it is stopped."""


class Slot:
    """A process and the episodes in it."""

    def __init__(self, load: dict[str, Any], num_lanes: int) -> None:
        named = [*load["classes"].values(), *load["tools"], load["agent"], load["train_call"]]
        surroundings = Surroundings(tuple(file_of(code) for code in named if code))
        self.process = SharedProcess("paceline.environment.hosting.worker", {"load": load}, surroundings)
        self.num_sessions = 0
        self.retired = False
        self.killed = False
        """Its process was killed from this side, for one of its calls."""
        self.emptied = asyncio.Event()
        """Set while no episode is in it."""
        self.emptied.set()
        self.num_calls = 0
        """Calls of user code that run in it now."""
        self.calls = asyncio.Semaphore(num_lanes)
        """Limit of coroutines; each lane is a limit of its own."""
        self.lanes = [asyncio.Lock() for _ in range(num_lanes)]
        """One synchronous call at a time."""
        self._lane_sessions = [0] * num_lanes
        self.hung: set[int] = set()
        """Lanes whose thread hangs: their episodes are lost."""

    def enter(self) -> int:
        """Take a further episode; return its lane."""
        self.num_sessions += 1
        self.emptied.clear()
        lane = min(range(len(self.lanes)), key=self._lane_sessions.__getitem__)
        self._lane_sessions[lane] += 1
        return lane

    def leave(self, lane: int) -> None:
        """Let an episode go. A retired slot ends with its last one."""
        self.num_sessions -= 1
        self._lane_sessions[lane] -= 1
        if not self.num_sessions:
            self.emptied.set()
            if self.retired:
                self.process.kill()

    def kill(self) -> None:
        """Kill the process for one of its calls; the others' episodes are lost by no fault of theirs."""
        self.killed = True
        self.process.kill()

    async def answers(self) -> bool:
        """Return whether the process answers at all; if not, it is killed."""
        try:
            await self.process.ask({"op": "ping"}, PING_S)
        except ProcessTimeout:
            self.kill()
            return False
        except ProcessDied:
            return False
        return True

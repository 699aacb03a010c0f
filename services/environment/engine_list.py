"""The rollout workers that may be asked for tokens now, and the choice of one for each session.

A session stays with its worker, whose prefix cache has the session's history, for as long as that worker is listed, holds a
version that is new enough and has not just failed. A new session goes to the worker with the fewest sessions.

Pure but for the clock: `services/environment/engines.py` makes the calls.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from paceline.groups import Version
from paceline.v1 import worker_pb2


class Wanted(NamedTuple):
    """The weights that a lease asks for."""

    oldest_step: int = 0
    """Step of the oldest version that may sample for the lease."""
    pinned: Version | None = None
    """The only version that may, for an evaluation."""
    pinned_member: str = ""
    """The only worker that may, for an evaluation."""


@dataclass(frozen=True)
class Engine:
    """A rollout worker of the list."""

    member_id: str
    address: str
    version: Version

    def serves(self, wanted: Wanted) -> bool:
        """Return whether it may be asked, as far as the list knows."""
        if wanted.pinned is not None:
            return self.member_id == wanted.pinned_member and self.version == wanted.pinned
        return self.version.step >= wanted.oldest_step


class EngineList:
    """The list that the coordinator sent last, and which worker each session asks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._engines: dict[str, Engine] = {}
        self._session_engines: dict[str, str] = {}
        self._num_sessions: Counter[str] = Counter()
        self._failed_until_s: dict[str, float] = {}
        self.num_moved = 0
        """Sessions that have gone from one worker to another so far."""

    def __len__(self) -> int:
        return len(self._engines)

    def replace(self, addresses: Iterable[worker_pb2.EngineAddress]) -> None:
        """Take a new list. A worker that is on both keeps its sessions."""
        self._engines = {
            each.member_id: Engine(
                each.member_id, each.address, Version(each.version.session, each.version.step)
            )
            for each in addresses
            if each.address
        }
        self._failed_until_s = {
            member_id: until_s
            for member_id, until_s in self._failed_until_s.items()
            if member_id in self._engines
        }

    def has(self, member_id: str) -> bool:
        return member_id in self._engines

    def put_off(self, member_id: str, seconds: float) -> None:
        """Ask others than this worker for a while, because it has just failed or refused."""
        self._failed_until_s[member_id] = self._clock() + seconds

    def choose(self, session: str, wanted: Wanted) -> Engine | None:
        """Return the worker to ask for the session's next turn; None while there is none."""
        now_s = self._clock()
        able = [
            engine
            for engine in self._engines.values()
            if engine.serves(wanted) and self._failed_until_s.get(engine.member_id, now_s) <= now_s
        ]
        if not able:
            return None
        before = self._session_engines.get(session)
        chosen = next((engine for engine in able if engine.member_id == before), None)
        if chosen is None:
            chosen = min(able, key=lambda engine: (self._num_sessions[engine.member_id], engine.member_id))
            self.num_moved += before is not None
            self._assign(session, chosen.member_id)
        return chosen

    def seconds_until_retry(self, wanted: Wanted) -> float | None:
        """Return the seconds until a worker that was put off may be asked again; None where only another list helps."""
        now_s = self._clock()
        pauses = [
            self._failed_until_s[engine.member_id] - now_s
            for engine in self._engines.values()
            if engine.serves(wanted) and engine.member_id in self._failed_until_s
        ]
        return max(0.0, min(pauses)) if pauses else None

    def end_session(self, session: str) -> None:
        member_id = self._session_engines.pop(session, None)
        if member_id is not None:
            self._leave(member_id)

    def _assign(self, session: str, member_id: str) -> None:
        self.end_session(session)
        self._session_engines[session] = member_id
        self._num_sessions[member_id] += 1

    def _leave(self, member_id: str) -> None:
        self._num_sessions[member_id] -= 1
        if not self._num_sessions[member_id]:
            del self._num_sessions[member_id]

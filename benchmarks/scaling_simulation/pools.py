"""Groups on their way through simulated pools: admission, generation, scoring, steps. Times in seconds, no real clock.

A worker has room for `slots` groups. A worker that is ordered takes work after its cold start; one that is to leave takes none
and leaves when its groups are done, as a drained worker does.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class SimulatedWorker:
    """One worker of a pool."""

    ready_s: float
    held: int = 0
    leaving: bool = False


@dataclass
class SimulatedPool:
    """A pool with a queue of groups before it."""

    name: str
    slots: int
    cold_start_s: float
    price: float
    """Cost of one worker for a second."""
    duration_s: Callable[[], float]
    """Seconds of one group."""
    queue: deque[int] = field(default_factory=deque)
    workers: list[SimulatedWorker] = field(default_factory=list)
    completed: int = 0
    occupied_s: float = 0.0
    """Seconds of taken slots by slots, summed over ready workers: worker-seconds of full room."""
    ready_s: float = 0.0
    """Worker-seconds of ready workers."""
    cost: float = 0.0

    def resize(self, size: int, now_s: float) -> None:
        """Order workers, or let the newest of those that stay leave. Workers that are starting leave first."""
        staying = [worker for worker in self.workers if not worker.leaving]
        for worker in self.workers:
            if worker.leaving and len(staying) < size:  # a worker that drains can stay
                worker.leaving = False
                staying.append(worker)
        for _ in range(size - len(staying)):
            self.workers.append(SimulatedWorker(now_s + self.cold_start_s))
        surplus = sorted(staying, key=lambda worker: (-worker.ready_s, worker.held))[: max(0, len(staying) - size)]
        for worker in surplus:
            worker.leaving = True
        self.workers = [worker for worker in self.workers if worker.held or not worker.leaving]

    def num_ready(self, now_s: float) -> int:
        """Workers that take work."""
        return sum(worker.ready_s <= now_s and not worker.leaving for worker in self.workers)

    def num_starting(self, now_s: float) -> int:
        """Workers that do not take work yet."""
        return sum(worker.ready_s > now_s and not worker.leaving for worker in self.workers)

    def pass_time(self, since_s: float, until_s: float) -> None:
        """Add up what stands between two events."""
        seconds = until_s - since_s
        if not seconds:
            return
        held = [worker.held for worker in self.workers if worker.ready_s <= since_s and not worker.leaving]
        self.cost += self.price * seconds * len(self.workers)
        self.ready_s += seconds * len(held)
        self.occupied_s += seconds * sum(held) / self.slots

    def free_worker(self, now_s: float) -> SimulatedWorker | None:
        """The ready worker with most room; None without any."""
        found, least = None, self.slots
        for worker in self.workers:
            if worker.held < least and worker.ready_s <= now_s and not worker.leaving:
                found, least = worker, worker.held
        return found


@dataclass
class SimulatedRun:
    """A learner that trains batches of `batch` groups while generation is up to `max_age` steps ahead."""

    generation: SimulatedPool
    scoring: SimulatedPool
    batch: int
    max_age: int
    step_s: Callable[[float], float]
    """Seconds of a step that begins at a time."""
    now_s: float = 0.0
    step_times_s: list[float] = field(default_factory=list)
    """Seconds of each trained step."""
    waited_s: float = 0.0
    """Seconds in which the learner waited for a batch."""
    ready: int = 0
    """Scored groups that are in no batch yet."""
    open_groups: int = 0
    _training: bool = False
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)

    def advance(self, until_s: float) -> None:
        """Let everything happen up to a time."""
        self._start_work()
        while self._events and self._events[0][0] <= until_s:
            at_s, _, act = heapq.heappop(self._events)
            self._pass_to(at_s)
            act()
            self._start_work()
        self._pass_to(until_s)

    def wake_at(self, at_s: float) -> None:
        """Look for work at a time, as when a worker becomes ready."""
        self._at(at_s, lambda: None)

    def _pass_to(self, at_s: float) -> None:
        for pool in (self.generation, self.scoring):
            pool.pass_time(self.now_s, at_s)
        if not self._training:
            self.waited_s += at_s - self.now_s
        self.now_s = at_s

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), act))

    def _start_work(self) -> None:
        while self.open_groups < (self.max_age + 1) * self.batch:
            self.open_groups += 1
            self.generation.queue.append(0)
        for pool, done in ((self.generation, self._generated), (self.scoring, self._scored)):
            while pool.queue and (worker := pool.free_worker(self.now_s)) is not None:
                pool.queue.popleft()
                worker.held += 1
                self._at(self.now_s + pool.duration_s(), lambda w=worker, d=done: d(w))
        if not self._training and self.ready >= self.batch:
            self.ready -= self.batch
            self._training = True
            step_s = self.step_s(self.now_s)
            self._at(self.now_s + step_s, lambda: self._trained(step_s))

    def _end_on(self, pool: SimulatedPool, worker: SimulatedWorker) -> None:
        pool.completed += 1
        worker.held -= 1
        if worker.leaving and not worker.held:
            pool.workers.remove(worker)

    def _generated(self, worker: SimulatedWorker) -> None:
        self._end_on(self.generation, worker)
        self.scoring.queue.append(0)

    def _scored(self, worker: SimulatedWorker) -> None:
        self._end_on(self.scoring, worker)
        self.ready += 1

    def _trained(self, step_s: float) -> None:
        self._training = False
        self.step_times_s.append(step_s)
        self.open_groups -= self.batch

"""Holds the parts of a learner's rank that other modules use: its asyncio loop, which runs beside the computing main
thread, and the orders of checkpoints and exports, which all ranks carry out after the current step."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from paceline.errors import Busy, Conflict
from paceline.services.common.relay import RelayConnection
from paceline.services.common.worker.membership import Membership
from paceline.v1 import worker_pb2

ResultT = TypeVar("ResultT")


class BackgroundLoop:
    """Runs coroutines beside the main thread. If an error ends a coroutine, the next `check` raises that error."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, poll_s: float = 1.0) -> None:
        self.loop, self._monotonic, self._poll_s = asyncio.new_event_loop(), monotonic, poll_s
        self._thread = threading.Thread(target=self.loop.run_forever, name="background", daemon=True)
        self._tasks: list[concurrent.futures.Future[Any]] = []
        self._closing = threading.Lock()
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._tasks.append(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    def check(self) -> None:
        """Raise the error that ended a started coroutine, if any."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    def wait(
        self,
        coroutine: Coroutine[Any, Any, ResultT],
        timeout_s: float,
        stopping: threading.Event | None = None,
        grace_s: float = 0.0,
    ) -> ResultT:
        """Return the coroutine's result, and check the started coroutines meanwhile. Raises TimeoutError after
        `timeout_s`, or `grace_s` after `stopping` was set, whichever comes first."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        deadline_s, shortened = self._monotonic() + timeout_s, False
        try:
            while (left_s := deadline_s - self._monotonic()) > 0:
                done, _ = concurrent.futures.wait([future], timeout=min(self._poll_s, left_s))
                if done:
                    return future.result()
                self.check()
                if stopping is not None and stopping.is_set() and not shortened:
                    shortened, deadline_s = True, min(deadline_s, self._monotonic() + grace_s)
            raise TimeoutError("no answer in time")
        finally:
            future.cancel()

    def post(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine without waiting, from any thread. Do nothing after `close`."""
        with self._closing:
            if self.loop.is_closed():
                coroutine.close()
            else:
                asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the loop without waiting, from any thread. Do nothing after `close`."""
        with self._closing:
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(function)

    def close(self) -> None:
        if self.loop.is_closed():
            return
        for task in self._tasks:
            task.cancel()
        concurrent.futures.wait(self._tasks, timeout=3.0)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=3.0)
        if not self._thread.is_alive():  # otherwise a callback hangs, and the process ends without it
            with self._closing:
                self.loop.close()


MAX_ORDERS = 16
"""At most this many orders of each kind may wait at the same time."""


class ExportOrder(NamedTuple):
    """An export of the weights after the current step."""

    name: str
    """Name of the folder under `exports/` in the run's directory; if empty, the step names the folder."""
    adapter_only: bool


@dataclass
class Orders:
    """Orders that wait on rank 0: the background loop adds orders, and the main thread takes orders."""

    checkpoint: list[Future[tuple[str, int]]] = field(default_factory=list)
    export: list[tuple[ExportOrder, Future[str]]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask_checkpoint(self) -> Future[tuple[str, int]]:
        """Order a checkpoint; the future gives its path and step. Raises Busy if too many wait."""
        future: Future[tuple[str, int]] = Future()
        with self._lock:
            _check_room(self.checkpoint)
            self.checkpoint.append(future)
        return future

    def ask_export(self, order: ExportOrder) -> Future[str]:
        """Order an export; the future gives its path. Raises Busy if too many wait."""
        future: Future[str] = Future()
        with self._lock:
            _check_room(self.export)
            self.export.append((order, future))
        return future

    def take_checkpoints(self) -> list[Future[tuple[str, int]]]:
        with self._lock:
            taken, self.checkpoint = self.checkpoint, []
        return [future for future in taken if future.set_running_or_notify_cancel()]

    def take_exports(self) -> list[tuple[ExportOrder, Future[str]]]:
        """Remove and return the first export order that was not cancelled, with all identical orders."""
        with self._lock:
            waiting = [(order, future) for order, future in self.export if not future.cancelled()]
            taken = [(order, future) for order, future in waiting if order == waiting[0][0]]
            self.export = [(order, future) for order, future in waiting if order != waiting[0][0]]
        return [(order, future) for order, future in taken if future.set_running_or_notify_cancel()]

    def refuse_all(self, reason: str) -> None:
        """Fail all orders, because the run is over."""
        for future in self.take_checkpoints():
            future.set_exception(Conflict(reason))
        while self.export:
            for _, export in self.take_exports():
                export.set_exception(Conflict(reason))


def _check_room(orders: Sequence[object]) -> None:
    if len(orders) >= MAX_ORDERS:
        raise Busy(f"{len(orders)} orders wait already for the current step to end; wait for one of these orders")


@dataclass
class Place:
    """Place of a rank among all ranks, its device, and the addresses of its machine."""

    rank: int
    world_size: int
    device: torch.device
    reachable: str = ""
    """Address at which others reach this machine."""
    weights_bind: str = ""
    """Address on which this machine listens for weights and ranks."""
    weights_host: str = ""
    """Address of `weights_bind` for others."""
    cpu_chosen: bool = False
    """True if the service was started with --device cpu."""


class AssignedRun:
    """Messages about runs that the main thread has not processed yet: the background loop writes, `take` reads."""

    def __init__(self) -> None:
        self._queue: queue.Queue[bytes] = queue.Queue()
        self.newest: worker_pb2.RunAssignment | None = None
        """Assignment that counts after a broken stream; None while this rank is idle."""
        self.early_roster: worker_pb2.Epoch | None = None
        """Roster that arrived before this rank had set up the run."""

    def put(self, assignment: worker_pb2.RunAssignment) -> None:
        self.newest = assignment
        self._queue.put(assignment.SerializeToString())

    def take(self, wait_s: float) -> bytes:
        """Return the newest assignment if one comes within `wait_s`, else empty bytes."""
        newest = b""
        try:
            newest = self._queue.get(timeout=wait_s)
            while True:
                newest = self._queue.get_nowait()
        except queue.Empty:
            return newest


class RankContext(Protocol):
    """Members of a rank that its parts use, implemented by `paceline.services.learner.rank.LearnerRank`."""

    place: Place
    grace_s: float
    orders: Orders
    background: BackgroundLoop
    stopping: threading.Event
    membership: Membership
    relay: RelayConnection
    assigned: AssignedRun

    @property
    def current_run(self) -> Any:
        """The run that this rank works on, a `paceline.services.learner.training.run.LearnerRun`; None without one."""

    def report(self, report: worker_pb2.ConnectRequest) -> None:
        """Send a report from any thread."""

    def stop(self) -> None:
        """End after the current step."""

    def leave(self, reason: str) -> None:
        """Leave the coordinator because of a fault."""

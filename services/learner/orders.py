"""Orders of checkpoints and exports, which all ranks carry out after the current step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.errors import Busy, Conflict

MAX_ORDERS = 16
"""Orders of each kind that may wait at one time."""


class ExportOrder(NamedTuple):
    """An export of the weights after the current step."""

    name: str
    """Folder under `exports/` in the run's directory; empty: by the step."""
    adapter_only: bool


@dataclass
class Orders:
    """Orders that wait on rank 0. The background loop adds them, the main thread takes them."""

    checkpoint: list[Future[tuple[str, int]]] = field(default_factory=list)
    export: list[tuple[ExportOrder, Future[str]]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask_checkpoint(self) -> Future[tuple[str, int]]:
        """Order a checkpoint; the future gives its path and step. Raises Busy when too many wait."""
        future: Future[tuple[str, int]] = Future()
        with self._lock:
            _check_room(self.checkpoint)
            self.checkpoint.append(future)
        return future

    def ask_export(self, order: ExportOrder) -> Future[str]:
        """Order an export; the future gives its path. Raises Busy when too many wait."""
        future: Future[str] = Future()
        with self._lock:
            _check_room(self.export)
            self.export.append((order, future))
        return future

    def take_checkpoints(self) -> list[Future[tuple[str, int]]]:
        """Remove and return the checkpoint orders that have not been cancelled."""
        with self._lock:
            taken, self.checkpoint = self.checkpoint, []
        return [future for future in taken if future.set_running_or_notify_cancel()]

    def take_exports(self) -> list[tuple[ExportOrder, Future[str]]]:
        """Remove and return the first export order that has not been cancelled, with all that want the same."""
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
        raise Busy(f"{len(orders)} such orders wait for the current step to end; one is enough")
